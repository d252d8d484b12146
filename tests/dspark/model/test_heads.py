"""Markov heads and the confidence head: formulas by hand, and training equal to stepping."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, tensor

from dspark.model.config import DSparkConfig
from dspark.model.heads import ConfidenceHead, MarkovHead
from tests.dspark.small import small_config, small_drafter

KINDS = ["vanilla", "gated", "rnn"]


def head_of(kind: str) -> MarkovHead:
    head = small_drafter(small_config(kind)).markov_head
    assert head is not None
    return head


def tiny_config(kind: str) -> DSparkConfig:
    return small_config(kind, hidden=1, markov_rank=1, vocab=2, draft_vocab=2)


def tiny_head(kind: str, weights: Mapping[str, object]) -> MarkovHead:
    """Rank 1, hidden width 1, two tokens: every number can be followed by hand."""
    head = MarkovHead(tiny_config(kind))
    head.load_state_dict({name: tensor(value) for name, value in weights.items()}, strict=True)
    return head


EMBEDDINGS = {"markov_w1.weight": [[2.0], [3.0]], "markov_w2.weight": [[1.0], [-10.0]]}


def test_the_vanilla_bias_is_the_low_rank_product() -> None:
    head = tiny_head("vanilla", EMBEDDINGS)
    e = head.embed(tensor([0, 1]))
    assert head.bias(head.block_features(e, torch.zeros(2, 1))).tolist() == [[2, -20], [3, -30]]


def test_the_gate_reads_hidden_state_before_embedding() -> None:
    weights = {"gate_proj.weight": [[1.0, 0.0]], "gate_proj.bias": [0.5]}
    head = tiny_head("gated", {**EMBEDDINGS, **weights})
    features = head.step(tensor([2.0]), tensor([-0.5]), None).features
    assert features.tolist() == [1.0]  # sigmoid(-0.5 + 0.5) = 1/2 of e = 2


def test_the_rnn_reads_state_then_embedding_then_hidden_state() -> None:
    # Rows gate, candidate, out; columns state, e, h.
    weights = {
        "joint_proj.weight": [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]],
        "joint_proj.bias": [0.0, 0.0, 0.1],
    }
    head = tiny_head("rnn", {**EMBEDDINGS, **weights})
    first = head.step(tensor([2.0]), tensor([0.0]), None)
    assert first.features.item() == pytest.approx(torch.tensor(0.1).tanh().item())  # out sees the empty state
    assert first.state is not None
    assert first.state.item() == pytest.approx(0.5 * torch.tensor(2.0).tanh().item())
    second = head.step(tensor([3.0]), tensor([0.0]), first.state)
    assert second.features.item() == pytest.approx((first.state + 0.1).tanh().item())
    assert second.state is not None
    assert second.state.item() == pytest.approx(0.5 * first.state.item() + 0.5 * torch.tensor(3.0).tanh().item())


@pytest.mark.parametrize("kind", KINDS)
def test_whole_blocks_equal_stepping_slot_by_slot(kind: str) -> None:
    head = head_of(kind)
    tokens, h, e = block_inputs(head, blocks=4, slots=6)
    whole = head.block_features(e, h)
    state: Tensor | None = None
    for slot in range(6):
        step = head.step(head.embed(tokens[:, slot]), h[:, slot], state)
        torch.testing.assert_close(step.features, whole[:, slot], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(head.bias(step.features), head.bias(whole)[:, slot], rtol=1e-5, atol=1e-5)
        state = step.state


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_hears_of_no_later_slot_and_of_no_other_block(kind: str) -> None:
    head = head_of(kind)
    _, h, e = block_inputs(head, blocks=2, slots=4)
    other_e, other_h = e.clone(), h.clone()
    other_e[0, 2] += 1
    other_h[0, 2] += 1
    changed = (head.block_features(other_e, other_h) != head.block_features(e, h)).any(-1).tolist()
    assert changed == [[False, False, True, kind == "rnn"], [False] * 4]


def block_inputs(head: MarkovHead, blocks: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(30, (blocks, slots), generator=generator)
    h = torch.randn(blocks, slots, 16, generator=generator)
    return tokens, h, head.embed(tokens).detach()


def confidence(config: DSparkConfig, weight: list[float]) -> ConfidenceHead:
    head = ConfidenceHead(config)
    head.load_state_dict({"proj.weight": tensor([weight]), "proj.bias": tensor([0.5])}, strict=True)
    return head


def test_confidence_is_a_line_through_hidden_state_then_embedding() -> None:
    head = confidence(tiny_config("vanilla"), [2.0, 10.0])
    assert head(tensor([[1.0], [3.0]]), tensor([[0.0], [0.1]])).tolist() == [2.5, 7.5]


def test_a_confidence_head_without_markov_reads_the_hidden_state_alone() -> None:
    head = confidence(small_config("confidence_alone", hidden=1), [2.0])
    assert head(tensor([[1.0], [3.0]]), None).tolist() == [2.5, 6.5]
    assert head(tensor([[1.0]]), tensor([[99.0]])).tolist() == [2.5]
