"""What memory the engine takes with so many requests of so many tokens, all at once, target and drafter.

    python benchmarks/memory.py

Every request has a prompt of its own and decodes to its end, with drafts. Says nothing of speed. Writes OUT with
provenance and prints the memory in MiB: of the models, of the engine before and after, and the most there was.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import torch
from provenance import provenance
from soak import resident_bytes

from dspark.cli.models import open_models
from dspark.engine.core import EngineCore
from dspark.engine.request import Request
from dspark.engine.settings import EngineSettings
from dspark.files import write_json
from dspark.scheduling import parse_policy

RESULTS = Path(__file__).parent / "results" / "memory.json"


def main() -> None:
    """Load, decode, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024, help="prompt and answer of a request")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of its prompt")
    parser.add_argument("--policy", default="fixed:3", help="one that needs no profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sizes = {"imports": mib()}
    models = open_models(target="embedded", drafter=None, speculation=True, dtype=arguments.dtype, device="cpu")
    sizes["models"] = mib()
    core = EngineCore(
        models.target.model,
        models.drafter,
        policy=parse_policy(arguments.policy),
        settings=EngineSettings(max_concurrency=arguments.requests, max_length=arguments.tokens),
    )
    sizes["engine"] = mib()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 40_000, (arguments.requests, arguments.prompt), generator=generator).tolist()
    handles = [
        core.submit(Request(prompt_ids=tuple(prompt), max_tokens=arguments.tokens - arguments.prompt))
        for prompt in prompts
    ]
    core.run()
    answered = [len(handle.result.completions[0].token_ids) for handle in handles if handle.result is not None]
    sizes["after"] = mib()
    sizes["most"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    settings |= {"dtype": models.target.model.compute_dtype, "drafter": models.drafter_name}
    result = {
        "settings": settings,
        "provenance": provenance(),
        "answered": answered,
        "resident_mib": sizes,
    }
    write_json(arguments.out, result)
    print(json.dumps({"requests": len(answered), "answer tokens": sum(answered), "resident MiB": sizes}, indent=1))


def mib() -> float:
    """Resident memory now."""
    return round(resident_bytes() / 2**20, 1)


if __name__ == "__main__":
    main()
