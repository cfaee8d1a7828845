"""Teacher states: what training needs of the target, computed once per row and kept on disk.

For every row of a data set the store holds the tap hidden states at all positions, and, at the positions that predict a
label, the target's last hidden state (after the final norm), the log-normaliser (logsumexp over the full vocabulary)
and the argmax of its logits there. A training step then needs the target's LM head on the draft columns only.

States are bfloat16; log-normalisers are float32 and belong to the *rounded* states multiplied by the LM head in
float32, so that ``exp(hidden · W_draft − log_normaliser)`` is a part of a distribution that sums to one exactly.

On disk: ``index.json`` and ``shard-00000.safetensors``, … A shard enters the index after it is complete, so a killed
run goes on after its last shard, and a store grows with its data set.

Shapes: S tokens of a row, P predicting positions of a row, T = taps x hidden size, H hidden size, V target vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.models.target import Target
from dspark.training.anchors import Span, anchor_positions
from dspark.training.data.rows import DataRow
from dspark.training.locking import exclusive
from dspark.types import Segment

__all__ = [
    "RowStates",
    "StateStore",
    "StoreEstimate",
    "StoreSpec",
    "StoredRow",
    "build_states",
    "estimate_states",
    "store_spec",
]

_FORMAT = 1
_INDEX = "index.json"
_LOGIT_ROWS = 256
_SORT_WINDOW = 256
_DISK_RESERVE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """What the states of a store depend on, apart from the rows.

    Attributes:
        target_fingerprint: the checkpoint that the states are of (``Target.fingerprint``).
        target_dtype: the type the target computed in.
        tap_layers: decoder layers whose outputs are stored side by side.
        max_length: rows are cut after this many tokens.
        final_softcap: ``cap * tanh(logits / cap)`` of the target's LM head; None for none.
    """

    target_fingerprint: str
    target_dtype: str
    tap_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    max_length: int
    final_softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """A row of the store: its length and response spans (cut at ``max_length``), and where its states lie."""

    id: str
    length: int
    response_spans: tuple[Span, ...]
    digest: str
    shard: int = -1
    token_offset: int = -1
    prediction_offset: int = -1

    @property
    def predictions(self) -> int:
        """P: number of positions that predict a label, which are the positions that can be an anchor."""
        return sum(max(0, end - start - 1) for start, end in self.response_spans)


@dataclass(frozen=True, kw_only=True)
class RowStates:
    """Teacher states of one row, read from the mapped file when they are used.

    Row i of the P-sized tensors belongs to position ``anchor_positions(response_spans)[i]`` and predicts the token
    after it.
    """

    token_ids_S: Tensor
    taps_ST: Tensor
    hidden_PH: Tensor
    log_normaliser_P: Tensor
    argmax_P: Tensor
    response_spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class StoreEstimate:
    """What computing the missing states costs."""

    rows: int
    tokens: int
    predictions: int
    bytes: int


def store_spec(target: Target, *, tap_layers: Sequence[int], max_length: int, target_dtype: str) -> StoreSpec:
    """Spec of a store of ``target``'s states.

    Raises:
        ValueError: a tap layer does not exist or is the final one, or ``max_length`` exceeds the target's context.
    """
    config = target.config
    for layer in tap_layers:
        if not 0 <= layer < config.num_layers - 1:
            raise ValueError(
                f"tap_layers has {layer}: the target has layers 0..{config.num_layers - 1}, "
                "and the final one is not allowed"
            )
    if not 2 <= max_length <= config.max_position_embeddings:
        raise ValueError(f"max_length is {max_length}: it must lie between 2 and {config.max_position_embeddings}")
    return StoreSpec(
        target_fingerprint=target.fingerprint,
        target_dtype=target_dtype,
        tap_layers=tuple(tap_layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_length=max_length,
        final_softcap=config.final_softcap,
    )


def estimate_states(rows: Sequence[DataRow], directory: Path, spec: StoreSpec) -> StoreEstimate:
    """Rows, tokens and bytes that ``build_states`` would add to ``directory``."""
    done = {row.id for row in StateStore.open(directory, spec, verify=False).rows} if _has_index(directory) else set()
    missing = [stored for row in rows if row.id not in done and (stored := _stored_row(row, spec)).predictions]
    return _estimate(missing, spec)


def build_states(
    target: Target,
    rows: Sequence[DataRow],
    directory: Path,
    spec: StoreSpec,
    *,
    tokens_per_batch: int = 2048,
    shard_bytes: int = 64 << 20,
    on_progress: Callable[[int], None] | None = None,
) -> StateStore:
    """Compute the states of all rows that ``directory`` lacks, then open it.

    Args:
        target: gives the states.
        rows: the data set. Rows without two response tokens in a span (after the cut at ``max_length``) are left out.
        directory: of the store; made if it is not there.
        spec: of the store (``store_spec``).
        tokens_per_batch: tokens of one target pass.
        shard_bytes: size of a shard, i.e. how much a kill can cost.
        on_progress: called with the number of tokens done after every batch.

    Raises:
        ValueError: the store belongs to another target or setting, a row changed, or a shard is damaged.
        OSError: the disk has not enough room, or another process writes to the store.
    """
    with exclusive(directory):
        return _build_states(target, rows, directory, spec, tokens_per_batch, shard_bytes, on_progress)


def _build_states(
    target: Target,
    rows: Sequence[DataRow],
    directory: Path,
    spec: StoreSpec,
    tokens_per_batch: int,
    shard_bytes: int,
    on_progress: Callable[[int], None] | None,
) -> StateStore:
    for pattern in (".shard-*.safetensors.*", f".{_INDEX}.*"):  # of a killed run; nothing else in there is ours
        for leftover in directory.glob(pattern):
            leftover.unlink()
    store = StateStore.open(directory, spec) if _has_index(directory) else StateStore(directory, spec, [])
    present = {row.id: row for row in store.rows}
    pending: list[tuple[StoredRow, DataRow]] = []
    for row in rows:
        stored = _stored_row(row, spec)
        if row.id not in present:
            if stored.predictions:
                pending.append((stored, row))
                present[row.id] = stored
        elif present[row.id].digest != stored.digest:
            raise ValueError(
                f"row {row.id} is not the one whose states {directory} holds: delete that directory, "
                "or give row ids that are unique and stable"
            )
    estimate = _estimate([stored for stored, _ in pending], spec)
    free = shutil.disk_usage(directory).free
    if estimate.bytes + _DISK_RESERVE_BYTES > free:
        raise OSError(
            f"teacher states of {estimate.rows:,} rows need {estimate.bytes / 2**30:.1f} GiB in {directory}, "
            f"which has {free / 2**30:.1f} GiB free (1 GiB is kept): use fewer rows, fewer tap layers or another --out"
        )
    shards = list(store.shards)
    buffer: list[tuple[StoredRow, dict[str, Tensor]]] = []
    buffered = 0
    for batch in _batches(pending, tokens_per_batch):
        buffer += _compute(target, batch, spec)
        buffered += _estimate([stored for stored, _ in batch], spec).bytes
        if buffered >= shard_bytes:
            shards.append(_write_shard(directory, len(shards), buffer))
            _write_index(directory, spec, shards)
            buffer, buffered = [], 0
        if on_progress is not None:
            on_progress(sum(stored.length for stored, _ in batch))
    if buffer:
        shards.append(_write_shard(directory, len(shards), buffer))
    if buffer or not _has_index(directory):
        _write_index(directory, spec, shards)
    return StateStore.open(directory, spec, verify=False)


class StateStore:
    """A store on disk, read through memory-mapped files."""

    def __init__(self, directory: Path, spec: StoreSpec, shards: Sequence[dict[str, Any]]) -> None:
        """Use :meth:`open`."""
        self.directory = directory
        self.spec = spec
        self.shards = tuple(shards)
        self._tensors: dict[int, dict[str, Tensor]] = {}

    @staticmethod
    def open(directory: Path, expected: StoreSpec | None = None, *, verify: bool = True) -> StateStore:
        """Open a store.

        Args:
            directory: of the store.
            expected: what the store must have been made for.
            verify: read every shard and compare its checksum; sizes are compared always.

        Raises:
            ValueError: not a store, made for something else, or a shard is missing, truncated or damaged.
        """
        path = directory / _INDEX
        try:
            index = json.loads(path.read_text())
            if index["format"] != _FORMAT:
                raise ValueError(
                    f"{path}: format {index['format']} is not {_FORMAT}: delete {directory} to compute it anew"
                )
            raw = index["spec"]
            spec = StoreSpec(**{**raw, "tap_layers": tuple(raw["tap_layers"])})
            shards = index["shards"]
        except FileNotFoundError:
            raise ValueError(f"{directory} holds no teacher states ({_INDEX} is missing)") from None
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): delete {directory} to compute it anew") from error
        if expected is not None and spec != expected:
            have, want = asdict(spec), asdict(expected)
            different = ", ".join(f"{key} {have[key]} (now {want[key]})" for key in have if have[key] != want[key])
            raise ValueError(f"{directory} holds teacher states of other settings: {different}. Give another directory")
        store = StateStore(directory, spec, shards)
        for shard in shards:
            store._check(shard, verify)
        return store

    @cached_property
    def rows(self) -> tuple[StoredRow, ...]:
        """All rows, in the order they were computed."""
        rows = []
        for number, shard in enumerate(self.shards):
            tokens = predictions = 0
            for row_id, length, spans, digest in shard["rows"]:
                row = StoredRow(
                    id=row_id,
                    length=length,
                    response_spans=tuple((start, end) for start, end in spans),
                    digest=digest,
                    shard=number,
                    token_offset=tokens,
                    prediction_offset=predictions,
                )
                tokens += row.length
                predictions += row.predictions
                rows.append(row)
        return tuple(rows)

    def read(self, row: StoredRow) -> RowStates:
        """States of a row; nothing is copied before it is used."""
        tensors = self._shard(row.shard)
        tokens = slice(row.token_offset, row.token_offset + row.length)
        predictions = slice(row.prediction_offset, row.prediction_offset + row.predictions)
        return RowStates(
            token_ids_S=tensors["token_ids"][tokens],
            taps_ST=tensors["taps"][tokens],
            hidden_PH=tensors["hidden"][predictions],
            log_normaliser_P=tensors["log_normaliser"][predictions],
            argmax_P=tensors["argmax"][predictions],
            response_spans=row.response_spans,
        )

    def _shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._tensors:
            path = self.directory / self.shards[number]["file"]
            try:
                with safe_open(path, framework="pt") as file:
                    self._tensors[number] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is damaged ({error}): delete {self.directory} to compute it anew") from error
        return self._tensors[number]

    def _check(self, shard: dict[str, Any], verify: bool) -> None:
        path = self.directory / shard["file"]
        remedy = f"delete {self.directory} to compute it anew"
        if not path.is_file():
            raise ValueError(f"{path} is missing: {remedy}")
        size = path.stat().st_size
        if size != shard["bytes"]:
            raise ValueError(f"{path} has {size} bytes instead of {shard['bytes']} (truncated?): {remedy}")
        if verify and (digest := _sha256(path)) != shard["sha256"]:
            raise ValueError(f"{path} is damaged (sha256 {digest[:12]}… instead of {shard['sha256'][:12]}…): {remedy}")


def _has_index(directory: Path) -> bool:
    return (directory / _INDEX).is_file()


def _stored_row(row: DataRow, spec: StoreSpec) -> StoredRow:
    length = min(len(row.token_ids), spec.max_length)
    spans = tuple((start, min(end, length)) for start, end in row.response_spans if start < length)
    digest = hashlib.sha256(np.asarray(row.token_ids[:length], dtype=np.int32).tobytes() + repr(spans).encode())
    return StoredRow(id=row.id, length=length, response_spans=spans, digest=digest.hexdigest()[:16])


def _estimate(rows: Sequence[StoredRow], spec: StoreSpec) -> StoreEstimate:
    tokens = sum(row.length for row in rows)
    predictions = sum(row.predictions for row in rows)
    tap_bytes = 2 * spec.hidden_size * len(spec.tap_layers)
    return StoreEstimate(
        rows=len(rows),
        tokens=tokens,
        predictions=predictions,
        bytes=tokens * (tap_bytes + 4) + predictions * (2 * spec.hidden_size + 8),
    )


def _batches(
    pending: Sequence[tuple[StoredRow, DataRow]], tokens_per_batch: int
) -> Iterator[list[tuple[StoredRow, DataRow]]]:
    """Rows of similar length together; a shard still holds a mixture of the data set."""
    for begin in range(0, len(pending), _SORT_WINDOW):
        batch: list[tuple[StoredRow, DataRow]] = []
        tokens = 0
        for item in sorted(pending[begin : begin + _SORT_WINDOW], key=lambda pair: pair[0].length):
            if batch and tokens + item[0].length > tokens_per_batch:
                yield batch
                batch, tokens = [], 0
            batch.append(item)
            tokens += item[0].length
        if batch:
            yield batch


@torch.inference_mode()
def _compute(
    target: Target, batch: Sequence[tuple[StoredRow, DataRow]], spec: StoreSpec
) -> list[tuple[StoredRow, dict[str, Tensor]]]:
    lengths = [stored.length for stored, _ in batch]
    token_ids_N = torch.tensor(
        [token for stored, row in batch for token in row.token_ids[: stored.length]], dtype=torch.long
    )
    if int(token_ids_N.max()) >= spec.vocab_size:
        raise ValueError(
            f"the data has token id {int(token_ids_N.max())}, the target's vocabulary {spec.vocab_size} ids: "
            "was it made with another target?"
        )
    segments = [Segment(slot=slot, start=0, length=length) for slot, length in enumerate(lengths)]
    cache = target.new_cache(len(batch), max(lengths))
    output = target.forward(token_ids_N.to(target.device), segments, cache, tap_layers=spec.tap_layers)
    assert output.taps_NT is not None
    starts = np.cumsum(lengths) - lengths
    positions = np.concatenate(
        [start + anchor_positions(stored.response_spans) for start, (stored, _) in zip(starts, batch, strict=True)]
    )
    hidden_PH = output.hidden_NH[torch.from_numpy(positions).to(target.device)].to(torch.bfloat16)
    log_normaliser_P, argmax_P = _normalisers(target, hidden_PH, spec.final_softcap)
    columns = {
        "token_ids": token_ids_N.to(torch.int32).split(lengths),
        "taps": output.taps_NT.to("cpu", torch.bfloat16).split(lengths),
    }
    predictions = [stored.predictions for stored, _ in batch]
    columns["hidden"] = hidden_PH.cpu().split(predictions)
    columns["log_normaliser"] = log_normaliser_P.cpu().split(predictions)
    columns["argmax"] = argmax_P.cpu().split(predictions)
    return [
        (stored, {name: parts[index] for name, parts in columns.items()}) for index, (stored, _) in enumerate(batch)
    ]


def _normalisers(target: Target, hidden_PH: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    weight_HV = target.lm_head_weight_VH.detach().float().T
    normalisers, maxima = [], []
    for chunk_MH in hidden_PH.split(_LOGIT_ROWS):
        logits_MV = chunk_MH.float() @ weight_HV
        if softcap is not None:
            logits_MV = softcap * torch.tanh(logits_MV / softcap)
        maximum_M, argmax_M = logits_MV.max(dim=1)
        total_M = logits_MV.sub_(maximum_M[:, None]).exp_().sum(dim=1)
        normalisers.append(maximum_M + total_M.log())
        maxima.append(argmax_M.to(torch.int32))
    return torch.cat(normalisers), torch.cat(maxima)


def _write_shard(directory: Path, number: int, rows: Sequence[tuple[StoredRow, dict[str, Tensor]]]) -> dict[str, Any]:
    file = f"shard-{number:05d}.safetensors"
    temporary = directory / f".{file}.{os.getpid()}"
    names = rows[0][1].keys()
    save_file({name: torch.cat([tensors[name] for _, tensors in rows]) for name in names}, temporary)
    _sync(temporary)
    os.replace(temporary, directory / file)
    return {
        "file": file,
        "bytes": (directory / file).stat().st_size,
        "sha256": _sha256(directory / file),
        "rows": [[row.id, row.length, row.response_spans, row.digest] for row, _ in rows],
    }


def _write_index(directory: Path, spec: StoreSpec, shards: Sequence[dict[str, Any]]) -> None:
    temporary = directory / f".{_INDEX}.{os.getpid()}"
    temporary.write_text(json.dumps({"format": _FORMAT, "spec": asdict(spec), "shards": list(shards)}))
    _sync(temporary)
    os.replace(temporary, directory / _INDEX)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
