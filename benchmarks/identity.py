"""Whether answers are the same tokens under every policy and load: greedy ones, and seeded ones with --seeded.

    python benchmarks/identity.py                                     our own prompts
    python benchmarks/identity.py --benchmarks DIRECTORY              gsm8k, humaneval and mt-bench as JSONL files

Each prompt is first answered by the target alone, one at a time; then all of them under every policy, so many at once.
The answers must be the same, bit for bit, where the target computes batch-invariantly: in int8 on a CPU. OUT keeps the
number of tokens and a hash of each of the target's own answers; a cell (policy, concurrency) that is in it is not run
again, so the same command goes on after an interruption. Ends with 1 if an answer differs. Says nothing of speed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from concurrency import measured_cost, opened, read_results
from provenance import provenance

from dspark.cli.models import Models
from dspark.decoding import SamplingSettings
from dspark.engine.core import EngineCore
from dspark.engine.request import Request
from dspark.engine.request_stream import StreamPrompt
from dspark.engine.settings import EngineSettings
from dspark.files import write_json
from dspark.scheduling import StepCost, parse_policy

RESULTS = Path(__file__).parent / "results" / "identity.json"
POLICIES = "off,fixed:1,fixed:3,fixed:7,threshold:0.4,immediate,delayed"
Answers = list[tuple[int, ...]]


def main() -> None:
    """Answer what is missing, compare, write, print."""
    arguments = parse_arguments()
    models, fitting, facts = opened(arguments)
    requests = requests_of(by_turns(fitting)[: arguments.prompts], models, arguments)
    settings = {
        **facts,
        "requests": len(requests),
        "sampling": asdict(requests[0].sampling),
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
    }
    results = read_results(arguments.out, settings)
    levels, policies = [int(level) for level in arguments.concurrency.split(",")], arguments.policies.split(",")
    needs_cost = any(parse_policy(policy).needs_cost for policy in policies)
    cost = measured_cost(models, max(levels)) if needs_cost else None
    if "alone" not in results:
        results["alone"] = digests(answered(models, requests, "off", 1, None, with_drafter=False))
        write_json(arguments.out, results, indent=1)
    for level in levels:
        for policy in policies:
            if any(cell["policy"] == policy and cell["concurrency"] == level for cell in results["cells"]):
                continue
            answers = digests(answered(models, requests, policy, level, cost))
            differing = [number for number, answer in enumerate(answers) if answer != results["alone"][number]]
            results["cells"].append({"policy": policy, "concurrency": level, "differing": differing})
            results["sessions"].append(provenance())
            write_json(arguments.out, results, indent=1)
            print(f"{policy}, {level} at once: {len(differing)} of {len(requests)} differ", flush=True)
    wrong = sum(len(cell["differing"]) for cell in results["cells"])
    print(f"{len(results['cells'])} cells of {len(requests)} answers: {wrong} answers differ")
    sys.exit(1 if wrong else 0)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", type=Path, help="directory with gsm8k, humaneval and mt-bench as NAME.jsonl")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", help="directory; by default ours, for the embedded target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=300, help="of the domains by turns")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--seeded", action="store_true", help="at temperature 1, each request with a seed of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def by_turns(prompts: Sequence[StreamPrompt]) -> list[StreamPrompt]:
    """First the first of each domain, then the second of each, and so on."""
    seen: dict[str, int] = {}
    order = []
    for prompt in prompts:
        seen[prompt.domain] = seen.get(prompt.domain, 0) + 1
        order.append((seen[prompt.domain], prompt))
    return [prompt for _, prompt in sorted(order, key=lambda pair: pair[0])]


def requests_of(prompts: Sequence[StreamPrompt], models: Models, arguments: argparse.Namespace) -> list[Request]:
    """One for each prompt."""
    return [
        Request(
            prompt_ids=prompt.prompt_ids,
            sampling=SamplingSettings(temperature=1.0, seed=number) if arguments.seeded else SamplingSettings(),
            max_tokens=arguments.max_tokens,
            stop_token_ids=models.target.stop_token_ids,
        )
        for number, prompt in enumerate(prompts)
    ]


def digests(answers: Answers) -> list[str]:
    """Of each answer its number of tokens and their hash."""
    return [f"{len(answer)}:{hashlib.sha256(json.dumps(answer).encode()).hexdigest()[:32]}" for answer in answers]


def answered(
    models: Models,
    requests: Sequence[Request],
    policy: str,
    level: int,
    cost: StepCost | None,
    *,
    with_drafter: bool = True,
) -> Answers:
    """The tokens of every answer, ``level`` requests at once."""
    core = EngineCore(
        models.target.model,
        models.drafter if with_drafter else None,
        policy=parse_policy(policy),
        settings=EngineSettings(max_concurrency=level),
        cost=cost,
    )
    answers: Answers = []
    for first in range(0, len(requests), 64):  # fewer than the queue holds
        handles = [core.submit(request) for request in requests[first : first + 64]]
        core.run()
        for handle in handles:
            assert handle.result is not None, handle.error
            answers.append(tuple(handle.result.completions[0].token_ids))
    return answers


if __name__ == "__main__":
    main()
