"""Two processes against one: gradients, curves, interruptions. Processes are few because each imports everything."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.drafters.checkpoint import load_drafter
from dspark.training.distributed import World
from dspark.training.loop import StepResult, Trainer
from tests.training.tiny import greedy_rows, tiny_target, write_rows
from tests.training.worker import first_gradients, open_run, train

ROOT = Path(__file__).parents[2]
ALONE = World.single("cpu")
TARGET = tiny_target(sharpness=8.0)
EAGLE3 = {"kind": "eagle3", "tap_layers": [0, 2], "block_size": 3, "draft_vocab_size": 40}


def start(jobs: list[dict[str, Any]], directory: Path, *, processes: int, torchrun: bool = False) -> list[Any]:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "jobs.json").write_text(json.dumps(jobs))
    worker = ["-m", "tests.training.worker", str(directory / "jobs.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    commands: list[tuple[list[str], dict[str, str]]] = [([sys.executable, *worker], environment)]
    if torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        commands = [([sys.executable, *launcher, *worker], environment)]
    elif processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes))
        common = {**environment, "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        commands = [([sys.executable, *worker], {**common, **rank}) for rank in ranks]
    return [
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in commands
    ]


def finish(processes: list[Any], timeout: float = 240.0) -> list[str]:
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def log(out: Path, event: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in entry.items() if k not in ("event", "seconds", "tokens_per_second")}
        for entry in entries
        if entry["event"] == event
    ]


def assert_same_curve(one: Path, other: Path, rtol: float) -> None:
    """All logged numbers of steps and held-out evaluations."""
    for event in ("step", "held_out"):
        expected, found = log(one, event), log(other, event)
        assert [entry["step"] for entry in found] == [entry["step"] for entry in expected]
        for a, b in zip(expected, found, strict=True):
            for name in a:
                assert flat(b[name]) == pytest.approx(flat(a[name]), rel=rtol, abs=rtol), (event, a["step"], name)


def flat(value: Any) -> Any:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in flat(inner)]
    return [number for inner in value for number in flat(inner)] if isinstance(value, list) else [value]


class Directories:
    """Runs of one data set and one store of teacher states."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = write_rows(root / "data", greedy_rows(TARGET, rows=8, copies=3))

    def job(self, name: str, **sections: Any) -> dict[str, Any]:
        states = {"directory": str(self.root / "states")}
        return {"data": str(self.data), "out": str(self.root / name), "sections": {"states": states, **sections}}

    def alone(self, name: str, **sections: Any) -> Path:
        """The same run in this process."""
        job = self.job(name, **sections)
        train(job, open_run(job, TARGET, ALONE), ALONE)
        return self.root / name

    def alone_until(self, name: str, step: int) -> None:
        """A run in this process that dies after a step."""

        def die(result: StepResult) -> None:
            if result.step == step:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Trainer(open_run(self.job(name), TARGET, ALONE), resume=True).run(on_step=die)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("distributed"))


# With rows=1 most parts are empty.
GRADIENTS: dict[str, dict[str, Any]] = {
    "ddp": {"distributed": {"strategy": "ddp"}},
    "fsdp": {"distributed": {"strategy": "fsdp"}, "drafter": {"num_layers": 2}},
    "ddp accumulated": {"distributed": {"strategy": "ddp"}, "batch": {"accumulate": 3}},
    "fsdp accumulated": {"distributed": {"strategy": "fsdp"}, "batch": {"accumulate": 3}},
    "ddp few rows": {"distributed": {"strategy": "ddp"}, "batch": {"accumulate": 2}, "rows": 1},
    "fsdp few rows": {"distributed": {"strategy": "fsdp"}, "batch": {"accumulate": 2}, "rows": 1},
    "fsdp rnn": {"distributed": {"strategy": "fsdp"}, "drafter": {"markov_head": "rnn"}},
    "fsdp eagle3": {"distributed": {"strategy": "fsdp"}, "eagle3": True},
    "alone accumulated": {"batch": {"accumulate": 3}},
}
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {"distributed": {"strategy": "ddp"}, "batch": {"accumulate": 2}},
    "fsdp": {"distributed": {"strategy": "fsdp"}},
    "fsdp autocast": {"distributed": {"strategy": "fsdp"}, "batch": {"autocast": True}},
}


def gradient_job(directories: Directories, name: str) -> dict[str, Any]:
    sections = dict(GRADIENTS[name])
    rows, eagle3 = sections.pop("rows", None), sections.pop("eagle3", False)
    job = directories.job(f"gradients {name}", **sections)
    job |= {"gradients": str(directories.root / f"{name}.pt"), "rows": rows}
    return {**job, "drafter": EAGLE3} if eagle3 else job


@pytest.fixture(scope="module")
def two_processes(directories: Directories) -> Directories:
    """What two processes under torchrun made."""
    jobs = [gradient_job(directories, name) for name in GRADIENTS if not name.startswith("alone")]
    jobs += [directories.job(f"two {name}", **sections) for name, sections in RUNS.items()]
    for strategy in ("ddp", "fsdp"):
        stopped = directories.job(f"two then one {strategy}", distributed={"strategy": strategy})
        jobs.append({**stopped, "terminate": (1, 7), "pause_s": 0.05})
        directories.alone_until(f"one then two {strategy}", 7)
        jobs.append(directories.job(f"one then two {strategy}", distributed={"strategy": strategy}))
    for strategy in ("ddp", "fsdp"):
        failing = {"distributed": {"strategy": strategy}}
        jobs.append({**directories.job(f"poisoned {strategy}", **failing), "poison": 1, "fails": True})
    jobs.append({**directories.job("full disk"), "full_disk": 7, "fails": True})
    (output,) = finish(start(jobs, directories.root / "torchrun", processes=2, torchrun=True))
    assert "Traceback" not in output, output
    return directories


@pytest.mark.parametrize("name", GRADIENTS)
def test_loss_and_gradients_are_those_of_one_process(name: str, two_processes: Directories) -> None:
    job = gradient_job(two_processes, name)
    found = torch.load(job["gradients"]) if not name.startswith("alone") else None
    if found is None:
        found = first_gradients(open_run(job, TARGET, ALONE), ALONE, None)
    job["sections"] |= {"distributed": {}, "batch": {}}
    expected = first_gradients(open_run({**job, "out": f"{job['out']} alone"}, TARGET, ALONE), ALONE, job["rows"])
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["terms"] == pytest.approx(expected["terms"], rel=1e-5)
    assert found["block_tokens"] == expected["block_tokens"] > 0
    assert found["gradients"].keys() == expected["gradients"].keys()
    for gradient in ("gradients", "whole"):
        for tensor in expected[gradient]:
            torch.testing.assert_close(found[gradient][tensor], expected[gradient][tensor], rtol=1e-4, atol=1e-6)
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in found["gradients"].values())


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run_is_that_of_one_process(name: str, two_processes: Directories) -> None:
    sections = {key: value for key, value in RUNS[name].items() if key != "distributed"}
    autocast = sections.get("batch", {}).get("autocast", False)
    alone = two_processes.alone(f"one {name}", **({"batch": {"autocast": True}} if autocast else {}))
    together = two_processes.root / f"two {name}"
    if autocast:  # bfloat16 rounds what differs in the last bit apart
        losses = [[entry["loss"] for entry in log(out, "step")] for out in (alone, together)]
        assert losses[1] == pytest.approx(losses[0], rel=0.02)
    else:
        assert_same_curve(alone, together, rtol=1e-4)
        one, two = (load_drafter(out / "drafter", TARGET.model).state_dict() for out in (alone, together))
        for tensor in one:
            torch.testing.assert_close(two[tensor], one[tensor], rtol=1e-3, atol=1e-4)
    origin = json.loads((together / "drafter" / "provenance.json").read_text())
    assert origin["processes"] == {"world_size": 2, "strategy": RUNS[name]["distributed"]["strategy"], "device": "cpu"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_goes_on_in_another_number_of_processes(strategy: str, two_processes: Directories) -> None:
    whole = two_processes.alone(f"whole {strategy}")
    stopped = two_processes.root / f"two then one {strategy}"
    (end,) = log(stopped, "end")
    assert (end["end"], 7 <= end["step"] < 12) == ("interrupted", True)  # by the other process's signal
    two_processes.alone(f"two then one {strategy}")
    for name in ("two then one", "one then two"):
        assert_same_curve(whole, two_processes.root / f"{name} {strategy}", rtol=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_that_is_not_finite_in_one_process_stops_all(strategy: str, two_processes: Directories) -> None:
    for rank in (0, 1):
        error = (two_processes.root / f"poisoned {strategy}.rank-{rank}").read_text()
        assert error.startswith("DivergenceError: step 2: the loss is nan; no checkpoint was made yet")


def test_a_full_disk_stops_all_and_nothing_is_lost(two_processes: Directories) -> None:
    main, other = ((two_processes.root / f"full disk.rank-{rank}").read_text() for rank in (0, 1))
    assert main.startswith("OSError: [Errno 27] the checkpoint of step 8 could not be written")
    assert "step-000006. Make room" in main  # the best one by then
    assert other.startswith("WorkerLostError: process 0 of the run failed (OSError: ")
    assert "Make room" in other
    assert_same_curve(two_processes.alone("undisturbed"), two_processes.alone("full disk"), rtol=1e-4)


def wait_for_step(out: Path, step: int, processes: list[Any]) -> None:
    deadline = time.monotonic() + 120
    while not (out / "log.jsonl").exists() or len(log(out, "step")) < step:
        assert all(process.poll() is None for process in processes), finish(processes)
        assert time.monotonic() < deadline, finish(processes, timeout=1)
        time.sleep(0.005)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_process_ends_the_others_and_nothing_is_lost(strategy: str, directories: Directories) -> None:
    job = directories.job(f"lost {strategy}", distributed={"strategy": strategy})
    processes = start([{**job, "pause_s": 0.05}], directories.root / f"lost {strategy} jobs", processes=2)
    wait_for_step(Path(job["out"]), 5, processes)
    processes[1].kill()
    began = time.monotonic()
    output, _ = finish(processes)
    assert time.monotonic() - began < 60
    assert processes[0].returncode == 1
    assert "WorkerLostError: another process of the run ended or no longer answers" in output
    assert "the same command goes on from the last checkpoint" in output
    assert not log(Path(job["out"]), "end")
    whole = directories.alone(f"not lost {strategy}")
    assert_same_curve(whole, directories.alone(f"lost {strategy}"), rtol=1e-4)


def test_kill_minus_nine_at_a_random_step(directories: Directories) -> None:
    step = random.randint(1, 11)
    job = directories.job("killed")
    processes = start([{**job, "pause_s": 0.05}], directories.root / "killed jobs", processes=1)
    wait_for_step(Path(job["out"]), step, processes)
    processes[0].kill()
    finish(processes)
    assert processes[0].returncode == -signal.SIGKILL
    assert not log(Path(job["out"]), "end"), step
    assert_same_curve(directories.alone("never killed"), directories.alone("killed"), rtol=1e-4)


@pytest.mark.parametrize(
    ("variables", "device", "message"),
    [
        ({"RANK": "0"}, "cpu", r"RANK but not WORLD_SIZE, LOCAL_RANK.*torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "cuda:1", "device is cuda:1 for 2 processes: write cuda"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}, "cuda", "no cuda device of its own"),
    ],
)
def test_a_start_that_cannot_work_is_refused(
    variables: dict[str, str], device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    whole = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if len(variables) > 1 else {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**whole, **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        World.start(device)


def test_one_process_communicates_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with World.start("cpu") as world:
        values = torch.ones(2)
        assert world.sum(values) is values
        assert (world.any(True), world.any(False)) == (True, False)
        assert (world.gather(3), world.broadcast_object(4), world.on_main(lambda: 5)) == ([3], 4, 5)
        assert world.main_first(lambda: 1, lambda: 2) == 1
        assert not torch.distributed.is_initialized()
