"""Teacher states on disk: ``index.json`` and ``shard-00000.safetensors``, …, read through memory-mapped files.

A shard says in its own metadata what it holds and appears in one step, so it is never lost: when the index does not
have it yet, it is taken up from there. (Shards of the first version say nothing and are known by the index only.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.files import replacing, sha256_file, write_json
from dspark.training.states.spec import RowStates, StoredRow, StoreSpec

__all__ = ["INDEX_FILE", "SHARD_PATTERN", "Shard", "StateStore", "read_index", "write_index", "write_shard"]

INDEX_FILE = "index.json"
SHARD_PATTERN = "shard-*.safetensors"
_FORMAT = 1
_METADATA = "dspark_states"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a store: its size and checksum, and its rows in the order they lie in it."""

    file: str
    bytes: int
    sha256: str
    rows: tuple[StoredRow, ...]

    def damage(self, directory: Path, *, verify: bool) -> str | None:
        """What is wrong with the file; None when it is there and whole. ``verify`` compares its checksum too."""
        path = directory / self.file
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != self.bytes:
            return f"{path} has {size} bytes instead of {self.bytes} (truncated?)"
        if verify and (digest := sha256_file(path)) != self.sha256:
            return f"{path} is damaged (sha256 {digest[:12]}… instead of {self.sha256[:12]}…)"
        return None


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a row's states lie: in which shard, and from which entry of its token and prediction tensors on."""

    shard: int
    token: int
    prediction: int


class StateStore:
    """A store on disk (a :class:`StateSource`), possibly seen with some of its tap layers only."""

    def __init__(self, directory: Path, stored: StoreSpec, tap_layers: Sequence[int], shards: Sequence[Shard]) -> None:
        """Use :meth:`open`. ``stored`` is the spec on disk; ``tap_layers`` those that are read, in that order."""
        self.directory = directory
        self.stored_spec = stored
        self.spec = replace(stored, tap_layers=tuple(tap_layers))
        self.shards = tuple(shards)
        self._tensors: dict[int, dict[str, Tensor]] = {}

    @staticmethod
    def open(directory: Path, expected: StoreSpec | None = None, *, verify: bool = True) -> StateStore:
        """Open a store.

        Args:
            directory: of the store.
            expected: what the store must have been made for. Its tap layers may be some of the stored ones.
            verify: read every shard and compare its checksum; sizes are compared always.

        Raises:
            ValueError: not a store, made for something else, or shards are missing, truncated or damaged.
        """
        spec, shards = read_index(directory, expected)
        damage = [text for shard in shards if (text := shard.damage(directory, verify=verify)) is not None]
        if damage:
            raise ValueError(damage_message(damage))
        return StateStore(directory, spec, (expected or spec).tap_layers, shards)

    @cached_property
    def rows(self) -> tuple[StoredRow, ...]:
        """All rows, shard by shard."""
        return tuple(row for shard in self.shards for row in shard.rows)

    def read(self, rows: Sequence[StoredRow], ends: Sequence[int] | None = None) -> list[RowStates]:
        """States of ``rows``, in their order (:class:`StateSource`).

        Nothing is copied, or read from the disk, before it is used; only a view of some tap layers copies those.

        Raises:
            ValueError: a shard has become unreadable.
        """
        if ends is None:
            ends = [row.length for row in rows]
        return [self._read(row, min(end, row.length)) for row, end in zip(rows, ends, strict=True)]

    def _read(self, row: StoredRow, end: int) -> RowStates:
        place = self._places[row.id]
        tensors = self._shard(place.shard)
        predictions = slice(place.prediction, place.prediction + row.predictions_before(end))
        return RowStates(
            token_ids_S=tensors["token_ids"][place.token : place.token + row.length],
            taps_ST=self._select(tensors["taps"][place.token : place.token + end]),
            hidden_PH=tensors["hidden"][predictions],
            log_normaliser_P=tensors["log_normaliser"][predictions],
            argmax_P=tensors["argmax"][predictions],
            response_spans=row.response_spans,
        )

    def _select(self, taps_ST: Tensor) -> Tensor:
        stored, asked = self.stored_spec.tap_layers, self.spec.tap_layers
        if asked == stored:
            return taps_ST
        parts = taps_ST.split(self.spec.hidden_size, dim=1)
        return torch.cat([parts[stored.index(layer)] for layer in asked], dim=1)

    @cached_property
    def _places(self) -> Mapping[str, _Place]:
        places = {}
        for number, shard in enumerate(self.shards):
            token = prediction = 0
            for row in shard.rows:
                places[row.id] = _Place(shard=number, token=token, prediction=prediction)
                token += row.length
                prediction += row.predictions
        return places

    def _shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._tensors:
            path = self.directory / self.shards[number].file
            try:
                with safe_open(path, framework="pt") as file:
                    self._tensors[number] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise ValueError(damage_message([f"{path} cannot be read ({error})"])) from error
        return self._tensors[number]


def damage_message(damage: Sequence[str]) -> str:
    """One error for all that is wrong with the shards of a store, with what to do."""
    return (
        f"{'; '.join(damage)}: delete the damaged files and repeat the command that made them; "
        "the rows of missing shards are computed anew, the others are kept"
    )


def read_index(directory: Path, expected: StoreSpec | None) -> tuple[StoreSpec, list[Shard]]:
    """Spec and shards that ``directory``'s index names; the shards themselves are not looked at.

    Raises:
        ValueError: there is no index, it is damaged, or the store was made for something else than ``expected``
            (whose tap layers may be some of the stored ones).
    """
    path = directory / INDEX_FILE
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != _FORMAT:
            raise ValueError(f"{path}: format {index['format']} is not {_FORMAT}: give another directory")
        spec = _spec_from(index["spec"])
        shards = [
            Shard(file=raw["file"], bytes=raw["bytes"], sha256=raw["sha256"], rows=_rows_from(raw["rows"]))
            for raw in index["shards"]
        ]
    except FileNotFoundError:
        raise ValueError(f"{directory} holds no teacher states ({INDEX_FILE} is missing)") from None
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}): delete that file and repeat the command that made it; "
            "it is written again from the shards"
        ) from error
    if expected is not None:
        check_spec(directory, spec, expected)
    return spec, shards


def write_index(directory: Path, spec: StoreSpec, shards: Sequence[Shard]) -> None:
    """Write the index, in the order of the shards' names.

    Raises:
        OSError: it could not be written; the one before it is unchanged.
    """
    content = [
        {"file": shard.file, "bytes": shard.bytes, "sha256": shard.sha256, "rows": _rows_to(shard.rows)}
        for shard in sorted(shards, key=lambda shard: shard.file)
    ]
    write_json(directory / INDEX_FILE, {"format": _FORMAT, "spec": asdict(spec), "shards": content}, indent=None)


def write_shard(
    directory: Path, number: int, spec: StoreSpec, rows: Sequence[StoredRow], states: Sequence[RowStates]
) -> Shard:
    """Write one shard.

    Raises:
        OSError: it could not be written; nothing of it is left.
    """
    path = directory / f"shard-{number:05d}.safetensors"
    tensors = {
        "token_ids": torch.cat([row.token_ids_S for row in states]),
        "taps": torch.cat([row.taps_ST for row in states]),
        "hidden": torch.cat([row.hidden_PH for row in states]),
        "log_normaliser": torch.cat([row.log_normaliser_P for row in states]),
        "argmax": torch.cat([row.argmax_P for row in states]),
    }
    content = {"format": _FORMAT, "spec": asdict(spec), "rows": _rows_to(rows)}
    with replacing(path) as partial:
        save_file(tensors, partial, metadata={_METADATA: json.dumps(content)})
    return _shard_of(path, rows)


def shard_from_file(path: Path) -> tuple[StoreSpec, Shard]:
    """A shard that no index names, from what it says of itself.

    Raises:
        ValueError: it says nothing, or cannot be read.
    """
    remedy = "delete that file and repeat the command; its rows are then computed anew"
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {})[_METADATA])
        if content["format"] != _FORMAT:
            raise ValueError(f"{path}: format {content['format']} is not {_FORMAT}: give another directory")
        return _spec_from(content["spec"]), _shard_of(path, _rows_from(content["rows"]))
    except KeyError:
        raise ValueError(f"{path} is not in {INDEX_FILE} and does not say what it holds: {remedy}") from None
    except (SafetensorError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not in {INDEX_FILE} and cannot be read ({error}): {remedy}") from error


def check_spec(directory: Path, have: StoreSpec, want: StoreSpec) -> None:
    """Compare the spec of a store with the expected one, whose tap layers may be some of the stored ones.

    Raises:
        ValueError: naming every field that differs.
    """
    covered = set(want.tap_layers) <= set(have.tap_layers)
    stored, expected = asdict(have), asdict(want)
    different = [
        f"{key} {stored[key]} (now {expected[key]})"
        for key in stored
        if stored[key] != expected[key] and not (key == "tap_layers" and covered)
    ]
    if different:
        raise ValueError(
            f"{directory} holds teacher states of other settings: {', '.join(different)}. Give another directory"
        )


def _shard_of(path: Path, rows: Sequence[StoredRow]) -> Shard:
    return Shard(file=path.name, bytes=path.stat().st_size, sha256=sha256_file(path), rows=tuple(rows))


def _spec_from(raw: Mapping[str, Any]) -> StoreSpec:
    return StoreSpec(**{**raw, "tap_layers": tuple(raw["tap_layers"])})


def _rows_to(rows: Sequence[StoredRow]) -> list[Any]:
    return [[row.id, row.length, row.response_spans, row.digest] for row in rows]


def _rows_from(raw: Sequence[Sequence[Any]]) -> tuple[StoredRow, ...]:
    return tuple(
        StoredRow(id=row_id, length=length, response_spans=tuple((a, b) for a, b in spans), digest=digest)
        for row_id, length, spans, digest in raw
    )
