"""The deep interest network: a history's ids weigh in a row by how they fit the row's target.

    v = sum_j a(e_j, t) e_j                          e_j the embeddings of the history, t that of the target
    a(e, t) = perceptron([e, t, e - t, e * t])       * is element by element

The weights are not normalised: a long history of what resembles the target says more than a short one. A perceptron
takes v in place of the history's sum, beside the other fields. Histories are never padded: the activation unit sees
the ids of all histories of a batch one after the other, and an empty history gives zeros.

Source: Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction", equation 3 and section 4.3, whose
"out product" is the difference and the product in the authors' code. The activations are ReLU, without Dice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recstore_ops.training.data.batch import Batch, weighted
from recstore_ops.training.models.deepfm import concatenated_fields
from recstore_ops.training.models.perceptron import perceptron
from recstore_ops.training.models.tables import Tables


class DIN(nn.Module):
    """Predicts the log-odds of a click from fields, and from histories by their attention to a target.

    Args:
        tables: makes the table `v`, `dim` columns an id. An id of a history and an equal id of its target have one row.
        dim: columns of an embedding.
        num_fields: fields of a row.
        sequences: pairs of fields, a history with any number of ids and its target with one id.
        attention_hidden: sizes of the hidden layers of each history's activation unit.
        hidden: sizes of the perceptron's hidden layers.
        dropout: after each hidden layer of the perceptron.
        init_std: embeddings start normal with this standard deviation.
        num_dense: dense features of a row.

    Raises:
        ValueError: no sequence, a field that is not there, two sequences of one history, or a history that is a target.
    """

    def __init__(
        self,
        tables: Tables,
        dim: int,
        *,
        num_fields: int,
        sequences: Sequence[tuple[int, int]],
        attention_hidden: Sequence[int] = (64, 32),
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        init_std: float = 0.01,
        num_dense: int = 0,
    ) -> None:
        super().__init__()
        _check_sequences(sequences, num_fields)
        self.v = tables("v", dim, init_std)
        self.sequences = list(sequences)
        self.units = nn.ModuleList(perceptron([4 * dim, *attention_hidden, 1]) for _ in sequences)
        self.deep = perceptron([num_fields * dim + num_dense, *hidden, 1], dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, float32 [B].

        Raises:
            ValueError: a row has no or several ids of a target.
        """
        features_ND = weighted(self.v(batch.ids), batch)
        fields_BX = concatenated_fields(features_ND * self._weights(features_ND, batch), batch)
        return self.deep(fields_BX).squeeze(1)

    def _weights(self, features_ND: Tensor, batch: Batch) -> Tensor:
        """a(e_j, t) of each id of a history and 1 of all others, [N, 1]."""
        weights_N1 = features_ND.new_ones(features_ND.shape[0], 1)
        row_N, field_N = _rows_and_fields(batch)
        for (history, target), unit in zip(self.sequences, self.units, strict=True):
            place_H = (field_N == history).nonzero().squeeze(1)
            target_H = _places_of_targets(batch, target).index_select(0, row_N[place_H])
            e_HD, t_HD = features_ND.index_select(0, place_H), features_ND.index_select(0, target_H)
            pairs_HX = torch.cat([e_HD, t_HD, e_HD - t_HD, e_HD * t_HD], dim=1)
            weights_N1 = weights_N1.index_copy(0, place_H, unit(pairs_HX))
        return weights_N1


def _check_sequences(sequences: Sequence[tuple[int, int]], num_fields: int) -> None:
    histories, targets = [history for history, _ in sequences], [target for _, target in sequences]
    if not sequences:
        raise ValueError("DIN needs a sequence, a history and its target, got none")
    for field in (*histories, *targets):
        if not 0 <= field < num_fields:
            raise ValueError(f"a sequence needs two of the {num_fields} fields, got {field}")
        if histories.count(field) > 1 or (field in histories and field in targets):
            raise ValueError(f"field {field} must be one history or targets only, got sequences {list(sequences)}")


def _rows_and_fields(batch: Batch) -> tuple[Tensor, Tensor]:
    """The row and the field of each id, int64 [N] each."""
    lengths = batch.offsets_or_ones().diff()
    bags = torch.arange(lengths.numel(), dtype=torch.int64, device=lengths.device)
    bag_N = torch.repeat_interleave(bags, lengths, output_size=batch.ids.numel())
    return bag_N // batch.num_fields, bag_N % batch.num_fields


def _places_of_targets(batch: Batch, field: int) -> Tensor:
    """The places in `ids` of the one id that each row has in a field, int64 [B]."""
    offsets = batch.offsets_or_ones()
    lengths_B = offsets.diff()[field :: batch.num_fields]
    if torch.compiler.is_compiling():
        # A program cannot say which row.
        torch.ops.aten._assert_async.msg(
            (lengths_B == 1).all(), f"field {field} is a sequence's target and must have one id a row"
        )
    elif bool((lengths_B != 1).any()):
        row = int((lengths_B != 1).nonzero()[0])
        raise ValueError(
            f"field {field} is the target of a sequence and must have one id a row, got {int(lengths_B[row])} in row "
            f"{row} of a batch"
        )
    return offsets[:-1][field :: batch.num_fields]
