"""Teacher states: what training needs of the target for every row, kept on disk or computed when asked for.

For every row of a data set there are the tap hidden states at all positions, and, at the positions that predict a
label, the target's last hidden state (after the final norm), the log-normaliser (logsumexp over the full vocabulary)
and the argmax of its logits there. A training step then needs the target's LM head on the draft columns only.

States are bfloat16; log-normalisers are float32 and belong to the *rounded* states multiplied by the LM head in
float32, so that ``exp(hidden · W_draft − log_normaliser)`` is a part of a distribution that sums to one exactly.

Two sources give them, with the same rounding: :class:`StateStore` reads what :func:`build_states` wrote, and
:class:`OnlineStates` runs the target whenever it is asked.

Shapes: S tokens of a row, P predicting positions of a row, T = taps x hidden size, H hidden size, V target vocabulary.
"""

from dspark.training.states.building import StoreEstimate, build_states, check_room, estimate_states
from dspark.training.states.online import OnlineStates
from dspark.training.states.spec import RowStates, StateSource, StoredRow, StoreSpec, cut_spans, store_spec
from dspark.training.states.store import StateStore

__all__ = [
    "OnlineStates",
    "RowStates",
    "StateSource",
    "StateStore",
    "StoreEstimate",
    "StoreSpec",
    "StoredRow",
    "build_states",
    "check_room",
    "cut_spans",
    "estimate_states",
    "store_spec",
]
