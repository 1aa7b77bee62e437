"""mask_labels: nothing is predicted across the boundary of two documents."""

import pytest
import torch
import torch.nn.functional as F

import packattn
from packattn import Packing, mask_labels

IGNORED = -100


def test_unshifted_labels_lose_the_first_of_every_document():
    labels = torch.tensor([11, 12, 13, 21, 31, 32])
    packing = Packing.from_lengths([3, 1, 2])
    assert mask_labels(labels, packing).tolist() == [IGNORED, 12, 13, IGNORED, IGNORED, 32]


def test_shifted_labels_lose_the_last_of_every_document():
    labels = torch.tensor([12, 13, 21, 31, 32, 99])
    packing = Packing.from_lengths([3, 1, 2])
    assert mask_labels(labels, packing, shifted=True).tolist() == [12, 13, IGNORED, IGNORED, 32, IGNORED]


@pytest.mark.parametrize("shifted", [False, True])
def test_padding_is_ignored_wherever_it_is(shifted):
    ids = torch.tensor([[1, 1, 0, 2], [0, 1, 1, 0]])
    packing = Packing.from_segment_ids(ids, pad_id=0)
    labels = torch.arange(8).view(2, 4)
    masked = mask_labels(labels, packing, shifted=shifted)
    kept = [[IGNORED] * 4 for _ in range(2)]
    for row, column in ((0, 0), (1, 1)) if shifted else ((0, 1), (1, 2)):
        kept[row][column] = int(labels[row, column])
    assert masked.tolist() == kept


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("lengths", [[0, 2, 0, 3, 0], [1, 1, 1], [0, 0], [], [5]], ids=str)
def test_empty_and_one_token_documents(lengths, shifted):
    packing = Packing.from_lengths(lengths, total=sum(lengths) + 2)
    labels = torch.arange(packing.total)
    want = torch.full_like(labels, IGNORED)
    for rows in packing.documents():
        inner = slice(rows.start, rows.stop - 1) if shifted else slice(rows.start + 1, rows.stop)
        if inner.stop > inner.start:
            want[inner] = labels[inner]
    assert torch.equal(mask_labels(labels, packing, shifted=shifted), want)


def test_the_two_kinds_of_labels_train_the_same_pairs():
    tokens = torch.arange(9)
    packing = Packing.from_lengths([4, 1, 2], total=9)
    unshifted = mask_labels(tokens, packing)
    shifted = mask_labels(tokens.roll(-1), packing, shifted=True)
    assert torch.equal(unshifted[1:], shifted[:-1]) and unshifted[0] == shifted[-1] == IGNORED


def test_own_ignore_index_and_labels_that_were_ignored():
    packing = Packing.from_lengths([2, 2])
    labels = torch.tensor([5, -1, 6, 7])
    assert mask_labels(labels, packing, ignore_index=-1).tolist() == [-1, -1, -1, 7]
    assert labels.tolist() == [5, -1, 6, 7], "the argument is left alone"


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3)], ids=str)
def test_shape_and_dtype_are_kept(dtype, shape):
    labels = torch.arange(6, dtype=dtype).view(shape)
    masked = mask_labels(labels, Packing.from_lengths([3, 3]))
    assert masked.dtype == dtype and masked.shape == shape
    strided = torch.arange(12, dtype=dtype).view(6, 2)[:, 0].view(6)
    assert mask_labels(strided, Packing.from_lengths([3, 3])).tolist() == [IGNORED, 2, 4, IGNORED, 8, 10]


def test_compiled_without_a_break_or_a_recompilation():
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(mask_labels, fullgraph=True, backend=backend)
    for lengths in ([3, 5], [2, 6], [1, 7]):
        packing = Packing.from_lengths(lengths)
        labels = torch.arange(8)
        assert torch.equal(compiled(labels, packing), mask_labels(labels, packing))
    assert len(frames) == 1


class Bigram(torch.nn.Module):
    """The next token from this one and its position: no attention, so that only labels and positions can go wrong."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = torch.nn.Embedding(20, 20), torch.nn.Embedding(16, 20)

    def forward(self, tokens, positions):
        return self.token(tokens) + self.position(positions)


def summed_loss(logits, labels, shifted):
    if not shifted:
        logits, labels = logits[:-1], labels[1:]
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()


@pytest.mark.parametrize("shifted", [False, True])
def test_mean_loss_of_a_packed_batch_is_that_of_the_documents_alone(shifted):
    model = Bigram().double()
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 20, (length,), generator=generator) for length in (5, 1, 4, 6)]
    total, count = 0.0, 0
    for document in documents:
        loss, tokens = summed_loss(model(document, torch.arange(len(document))), document, False)
        total, count = total + loss, count + tokens
    packing = Packing.from_lengths([len(document) for document in documents], total=18)
    tokens = torch.cat([*documents, torch.zeros(2, dtype=torch.long)])
    labels = tokens.roll(-1) if shifted else tokens
    logits = model(tokens, packing.position_ids)
    packed, packed_count = summed_loss(logits, mask_labels(labels, packing, shifted=shifted), shifted)
    assert packed_count == count == 4 + 0 + 3 + 5
    torch.testing.assert_close(packed / packed_count, total / count)
    wrong, wrong_count = summed_loss(logits, labels, shifted)
    assert abs(wrong / wrong_count - total / count) > 1e-3, "without the mask the loss must differ"


@pytest.mark.parametrize(
    ("labels", "options", "error", "words"),
    [
        (torch.zeros(5), {}, TypeError, r"labels must be int16, int32 or int64, got float32 \[5\] on cpu"),
        (torch.zeros(5, dtype=torch.uint8), {}, TypeError, "labels must be int16, int32 or int64, got uint8"),
        ([1, 2, 3, 4, 5], {}, TypeError, "labels must be int16, int32 or int64, got list"),
        (torch.zeros(4, dtype=torch.long), {}, ValueError, r"the packing's 5 tokens, got int64 \[4\]"),
        (torch.zeros(1, 1, 5, dtype=torch.long), {}, ValueError, r"must be \[T\] or \[B, S\]"),
        (torch.zeros(5, dtype=torch.long, device="meta"), {}, ValueError, "labels are on meta, but packing is on cpu"),
        (torch.zeros(5, dtype=torch.int16), {"ignore_index": -(2**20)}, ValueError, "ignore_index must fit"),
        (torch.zeros(5, dtype=torch.long), {"ignore_index": -100.0}, TypeError, "ignore_index must be an integer"),
    ],
)
def test_refusals(labels, options, error, words):
    with pytest.raises(error, match=words):
        mask_labels(labels, Packing.from_lengths([3, 2]), **options)


def test_lengths_instead_of_a_packing_are_refused():
    with pytest.raises(TypeError, match="packing must be a packattn.Packing, got list"):
        mask_labels(torch.zeros(5, dtype=torch.long), [3, 2])


def test_it_is_in_the_public_api():
    assert packattn.mask_labels is mask_labels
