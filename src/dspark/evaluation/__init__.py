"""How good a drafter is: benchmark prompts, runs, statistics, tables and the report."""
