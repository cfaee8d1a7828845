"""``dspark serve``: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from dspark.cli.options import (
    EMBEDDED,
    MODELS,
    NO_DRAFTER,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    TargetOption,
)

if TYPE_CHECKING:
    from types import FrameType

    from dspark.cli.models import Models
    from dspark.engine.profile import StoredProfile
    from dspark.engine.settings import EngineSettings
    from dspark.scheduling import Policy
    from dspark.server.settings import ServerSettings

LOAD = Group("Load", sort_key=6)
HTTP = Group("HTTP", sort_key=7)

KEY_VARIABLE = "DSPARK_API_KEY"
_LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def serve(
    *,
    target: TargetOption = EMBEDDED,
    drafter: DrafterOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    policy: Annotated[
        str | None,
        Parameter(
            group=MODELS,
            show_default=False,
            help="What decides how much is drafted and verified: `off`, `fixed:K`, `threshold:C`, `immediate` or"
            " `delayed`. By default `delayed`, and `off` without a drafter.",
        ),
    ] = None,
    max_concurrency: Annotated[int, Parameter(group=LOAD, help="Answers that are decoded at once.")] = 32,
    max_length: Annotated[
        int | None,
        Parameter(group=LOAD, show_default=False, help="Tokens of a prompt and its answer; the context by default."),
    ] = None,
    kv_memory: Annotated[
        float | None,
        Parameter(
            group=LOAD,
            show_default=False,
            help="GiB for keys and values, taken at the start; what --max-concurrency answers of --max-length need, or"
            " 1 without that.",
        ),
    ] = None,
    max_waiting: Annotated[
        int, Parameter(group=LOAD, help="Requests that may wait; more are refused with 429.")
    ] = 1024,
    host: Annotated[str, Parameter(group=HTTP, help="Address to listen at; `0.0.0.0` is all of this machine's.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, Parameter(group=HTTP, help="0 takes one that is free.")] = 8000,
    api_key: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            show_default=False,
            group=HTTP,
            help=f"Serve only who sends this key; may be given several times. Other users of the machine can read it"
            f" here: the environment's {KEY_VARIABLE} (several with commas between) is safer.",
        ),
    ] = (),
    model_name: Annotated[
        str | None, Parameter(group=HTTP, show_default=False, help="What clients call the model; the target's name.")
    ] = None,
    separate_keys: Annotated[
        bool,
        Parameter(
            negative=(), show_default=False, group=HTTP, help="Never reuse what was computed for another API key."
        ),
    ] = False,
    max_body: Annotated[float, Parameter(group=HTTP, help="MiB of a request at most.")] = 4.0,
    drain_seconds: Annotated[
        float, Parameter(group=HTTP, help="Seconds for running requests to finish when the server is told to end.")
    ] = 30.0,
) -> int:
    """Serve a target with its drafter to clients of OpenAI's API.

    The first start on a machine measures what steps cost there, which takes a minute or more (`dspark profile`). The
    port answers from the beginning, with 503 until the ready line is printed. Examples:

    - `dspark serve`
    - `DSPARK_API_KEY=secret dspark serve --host 0.0.0.0 --max-concurrency 64 --kv-memory 4`
    - `dspark serve --target TARGET --drafter DRAFTER --policy fixed:3`
    """
    from dspark.engine.settings import EngineSettings
    from dspark.scheduling import Off, parse_policy
    from dspark.server.settings import ServerSettings

    chosen = parse_policy(policy or ("off" if drafter == NO_DRAFTER else "delayed"))
    if not isinstance(chosen, Off) and (drafter == NO_DRAFTER or (drafter is None and target != EMBEDDED)):
        raise ValueError(f"--policy {chosen.name} needs a drafter for {target}: give --drafter, or --policy off")
    if kv_memory is not None and not 0.0 < kv_memory < 2**20:
        raise ValueError(f"--kv-memory is {kv_memory:g}; give GiB above 0")
    if not 0.0 < max_body < 2**20:
        raise ValueError(f"--max-body is {max_body:g}; give MiB above 0")
    engine_settings = EngineSettings(
        max_concurrency=max_concurrency,
        max_length=max_length,
        kv_memory_bytes=None if kv_memory is None else int(kv_memory * 2**30),
        max_waiting=max_waiting,
    )
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=(*api_key, *_keys_of_environment()),
        model_name=model_name,
        max_body_bytes=int(max_body * 2**20),
        separate_keys=separate_keys,
        drain_seconds=drain_seconds,
    )
    return _serve(settings, engine_settings, chosen, target=target, drafter=drafter, dtype=dtype, device=device)


def _serve(
    settings: ServerSettings,
    engine_settings: EngineSettings,
    policy: Policy,
    *,
    target: str,
    drafter: str | None,
    dtype: str,
    device: str,
) -> int:
    from dspark.cli.models import open_models
    from dspark.cli.profile import measure_profile, usable_profile
    from dspark.engine.engine import Engine
    from dspark.engine.profile import profile_key
    from dspark.scheduling import Off
    from dspark.server.app import loading_app
    from dspark.server.serving import HttpServer, allow_many_connections, serve_until_told
    from dspark.server.state import ServerState

    logging.basicConfig(format=_LOG_FORMAT, level=logging.WARNING)
    logging.getLogger("dspark").setLevel(logging.INFO)
    allow_many_connections()
    app = loading_app(settings)
    http = HttpServer(app, settings)
    http.start()
    signal.signal(signal.SIGTERM, _end)
    print(f"dspark: listening at {http.url}; loading", file=sys.stderr)
    try:
        models = open_models(
            target=target, drafter=drafter, speculation=not isinstance(policy, Off), dtype=dtype, device=device
        )
        profile, is_new = None, False
        if policy.needs_cost and models.drafter is not None:
            key = profile_key(models.target, models.drafter, max_concurrency=engine_settings.max_concurrency)
            profile = usable_profile(key)
            is_new = profile is None
            profile = profile or measure_profile(models, key, quiet=False)
        with Engine(
            models.target,
            models.drafter,
            policy=policy,
            cost=None if profile is None else profile.cost,
            settings=engine_settings,
        ) as engine:
            state = ServerState.of(engine, settings)
            app.state.lifecycle.become_ready(state)
            if not settings.api_keys and settings.host not in ("127.0.0.1", "localhost", "::1"):
                print("dspark: everybody who reaches this address is served: there is no --api-key", file=sys.stderr)
            facts = _facts(models, policy, profile, is_new)
            facts += [f"{engine_settings.max_concurrency} answers at once", f"{engine.max_length} tokens each at most"]
            print(f"ready: {http.url}/v1 serves {state.model_name}: {', '.join(facts)}", flush=True)
            return serve_until_told(http, app.state.lifecycle, settings)
    finally:
        http.stop()


def _facts(models: Models, policy: Policy, profile: StoredProfile | None, is_new: bool) -> list[str]:
    """What was loaded, calibrated and profiled."""
    from dspark.cli.bench import drafter_facts
    from dspark.drafters.checkpoint import read_drafter_calibration

    model = models.target.model
    facts = [f"{model.compute_dtype} on {model.device}"]
    drafter = drafter_facts(models)
    if drafter is None:
        facts.append("no drafter")
    else:
        facts.append(f"drafter {drafter['name']} ({drafter['kind']}, {drafter['block_size']} tokens)")
        file = read_drafter_calibration(models.drafter_name)
        facts.append(f"calibrated {file.date or 'elsewhere'}" if file is not None else "not calibrated")
    facts.append(f"policy {policy.name}")
    if profile is not None:
        facts.append(f"profiled {'now' if is_new else profile.measured_at}")
    return facts


def _keys_of_environment() -> list[str]:
    return [key for key in os.environ.get(KEY_VARIABLE, "").split(",") if key]


def _end(number: int, frame: FrameType | None) -> None:
    """Nothing is served yet: there is nothing to wait for."""
    raise SystemExit(0)
