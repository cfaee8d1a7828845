"""The options that several commands share, as annotated types: one name, one help text, one group each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

PROMPT = Group("Prompt", sort_key=1)
MODELS = Group("Models", sort_key=2)
SAMPLING = Group("Sampling", sort_key=3)
LENGTH = Group("Length", sort_key=4)
OUTPUT = Group("Output", sort_key=5)

EMBEDDED = "embedded"
NO_DRAFTER = "none"

TargetOption = Annotated[
    str,
    Parameter(
        group=MODELS,
        help="Whose output is generated: `embedded` (SmolLM2-135M-Instruct), a directory, a GGUF file or a name on the"
        " Hugging Face hub.",
    ),
]
DrafterOption = Annotated[
    str | None,
    Parameter(
        group=MODELS,
        help="What proposes tokens: a drafter's directory, `embedded` (ours, for the embedded target) or `none`."
        " Another target needs a drafter trained for it.",
    ),
]
MaxDraftTokensOption = Annotated[
    int | None,
    Parameter(
        group=MODELS,
        help="Draft at most this many tokens a round. By default 4 for a target in int8 (3 on a CPU with AVX2 only),"
        " where checking more tokens in a pass takes longer than they bring, and the drafter's block otherwise. Changes"
        " the speed, never the output.",
    ),
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"],
    Parameter(
        group=MODELS,
        help="Number format of the target's weights and products. `auto` is int8 on a CPU with AVX2 or AVX512-VNNI"
        " (for targets with heads of 8, 16, ... dimensions), elsewhere bfloat16, or float32 on a CPU without"
        " instructions for bfloat16.",
    ),
]
DeviceOption = Annotated[str, Parameter(group=MODELS, help="Where the models run: `cpu`, `cuda`, `cuda:1`, ...")]

TemperatureOption = Annotated[
    float,
    Parameter(group=SAMPLING, help="0 takes the most likely token each time (greedy); 1 samples as the target does."),
]
TopPOption = Annotated[
    float, Parameter(group=SAMPLING, help="Sample from the smallest set of tokens that holds this much probability.")
]
TopKOption = Annotated[int | None, Parameter(group=SAMPLING, help="Sample from the K most likely tokens.")]
MinPOption = Annotated[
    float, Parameter(group=SAMPLING, help="Drop tokens less likely than this share of the most likely one.")
]
RepetitionPenaltyOption = Annotated[
    float, Parameter(group=SAMPLING, help="Above 1, tokens of prompt and answer become less likely to be said again.")
]
PresencePenaltyOption = Annotated[
    float, Parameter(group=SAMPLING, help="Taken off the logit of each token that the answer already has.")
]
FrequencyPenaltyOption = Annotated[
    float, Parameter(group=SAMPLING, help="Taken off a token's logit once for each time the answer already has it.")
]
SeedOption = Annotated[
    int | None,
    Parameter(group=SAMPLING, help="Makes sampling repeatable: one seed, one output, with speculation on or off."),
]
MaxTokensOption = Annotated[int, Parameter(group=LENGTH, help="End an answer after this many tokens.")]
PromptsOption = Annotated[
    Path | None, Parameter(group=PROMPT, help='Prompts from a JSONL file, `{"turns": ["...", ...]}` a line.')
]
BenchmarksOption = Annotated[
    Path | None,
    Parameter(group=PROMPT, help="Directory with NAME.jsonl of benchmarks; what it lacks comes from the hub."),
]
LimitOption = Annotated[int | None, Parameter(group=PROMPT, help="Prompts of a benchmark at most, chosen by --seed.")]
ForbidOption = Annotated[
    tuple[Path, ...],
    Parameter(
        negative=(),
        show_default=False,
        group=PROMPT,
        help="JSONL file of prompts to stay clear of, such as a benchmark: a prompt that shares 8 words in a row"
        " with one of them is dropped. May be given several times.",
    ),
]
JsonOption = Annotated[
    bool,
    Parameter(
        name="--json", negative=(), show_default=False, group=OUTPUT, help="Print JSON for machines, and nothing else."
    ),
]
