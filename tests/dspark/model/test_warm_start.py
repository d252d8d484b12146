"""Starts from the target: copied layers, and the best low-rank form of its bigrams."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.errors import InputError
from dspark.learning import DrafterSettings
from dspark.model.config import draft_config
from dspark.model.drafter import Drafter, new_drafter
from dspark.model.vocabulary import Vocabulary
from dspark.model.warm_start import Bigrams, bigrams_of, start_from_bigrams, start_from_target
from dspark.sections import TargetSettings
from dspark.target import Target, load_target
from tests.tiny import MASK_ID, tiny_target_folder


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(settings(tiny_target_folder(tmp_path_factory.mktemp("target"), request.param)))


def settings(folder: Path | str) -> TargetSettings:
    return TargetSettings(model=str(folder), dtype="fp32")


def fresh(target: Target, rank: int = 0, head: str = "vanilla", layers: int = 2) -> Drafter:
    shape = DrafterSettings.model_validate(
        {"layers": layers, "block": 3, "taps": (0, 2, 4), "mask_token_id": MASK_ID, "markov_rank": rank,
         "markov_head": head, "confidence": False}
    )  # fmt: skip
    return new_drafter(draft_config(target.config, shape), seed=0)


def test_layers_and_norms_are_the_target_s_own_and_fc_passes_the_last_tap_on(target: Target) -> None:
    drafter = fresh(target)
    before = drafter.fc.weight.clone()
    start_from_target(drafter, settings(target.name))
    theirs = target.decoder.state_dict()
    for name, value in drafter.layers.state_dict().items():
        number, rest = name.split(".", 1)
        if "q_norm" not in name and "k_norm" not in name:
            assert torch.equal(value, theirs[f"layers.{4 + int(number)}.{rest}"]), name
    assert torch.equal(drafter.norm.weight, theirs["norm.weight"])
    assert torch.equal(drafter.hidden_norm.weight, theirs["layers.5.input_layernorm.weight"])
    identity = torch.cat((torch.zeros(48, 96), torch.eye(48)), dim=1)
    torch.testing.assert_close(drafter.fc.weight - identity, 0.1 * before)


def test_norms_of_queries_and_keys_are_the_target_s_or_give_them_its_average_size(target: Target) -> None:
    drafter = fresh(target)
    start_from_target(drafter, settings(target.name))
    for number, (ours, theirs) in enumerate(zip(drafter.layers, target.decoder.layers[4:], strict=True)):
        inputs = ours.input_layernorm(torch.randn(4000, 48, generator=torch.Generator().manual_seed(number)))
        for name in ("q", "k"):
            norm = getattr(ours.self_attn, f"{name}_norm")
            made = norm(getattr(ours.self_attn, f"{name}_proj")(inputs).view(4000, -1, 16)).square().mean()
            wanted = getattr(theirs.self_attn, f"{name}_proj")(inputs).view(4000, -1, 16)
            if hasattr(theirs.self_attn, "q_norm"):
                wanted = getattr(theirs.self_attn, f"{name}_norm")(wanted)
            assert made.item() == pytest.approx(wanted.square().mean().item(), rel=0.03)


def test_more_draft_layers_than_the_target_has_are_refused(target: Target) -> None:
    with pytest.raises(InputError, match="copies 7 layers, the target has 6"):
        start_from_target(fresh(target, layers=7), settings(target.name))


def test_bigram_states_are_those_after_the_prompt_and_one_token(target: Target) -> None:
    prompt, tokens = [257, 65, 10], torch.arange(0, 300, 1)
    for prefix in (prompt, [258]):
        found = bigrams_of(target, prefix, torch.cat((tokens, tokens)), torch.ones(600)).states_NH
        alone = target.states(torch.tensor([[*prefix, int(token)] for token in tokens]), ()).final[:, -1]
        torch.testing.assert_close(found, torch.cat((alone, alone)), atol=1e-4, rtol=1e-4)


def example(count: int = 40) -> tuple[Bigrams, Tensor]:
    """Bigrams of random states, and the matrix of the biases that they stand for, about their mean."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(count, 48, generator=generator)
    counts = torch.randint(1, 9, (count,), generator=generator)
    weights = counts[:, None] / counts.sum()
    return Bigrams(torch.arange(count) * 3, counts, states), states - (weights * states).sum(0)


@pytest.mark.parametrize("head", ["vanilla", "gated"])
def test_with_enough_rank_the_bias_is_the_target_s_prediction_about_the_mean(target: Target, head: str) -> None:
    drafter = fresh(target, rank=64, head=head)
    bigrams, centred = example()
    start_from_bigrams(drafter, bigrams, target.vocabulary)
    bias = bias_of(drafter)
    wanted = centred @ target.vocabulary.head_VH.T
    torch.testing.assert_close(bias[bigrams.tokens_N], wanted - wanted.mean(1, keepdim=True), atol=1e-3, rtol=1e-3)
    others = torch.ones(320, dtype=torch.bool).index_fill(0, bigrams.tokens_N, False)
    assert not bias[others].any()


def bias_of(drafter: Drafter) -> Tensor:
    """Biases [V, V] after every token, with gates half open, where they start."""
    head = drafter.markov_head
    assert head is not None
    return (0.5 if head.kind == "gated" else 1.0) * head.markov_w1.weight.detach() @ head.markov_w2.weight.detach().T


def test_with_less_rank_no_other_factors_come_closer_weighted_by_the_counts(target: Target) -> None:
    drafter = fresh(target, rank=5)
    bigrams, centred = example()
    vocabulary = target.vocabulary.narrowed(torch.arange(0, 320, 2))
    small = Drafter(replace(drafter.config, draft_vocab=len(vocabulary.draft_head_DH)))
    start_from_bigrams(small, bigrams, vocabulary)
    wanted = centred @ vocabulary.draft_head_DH.T
    wanted = (bigrams.counts_N.sqrt()[:, None] * (wanted - wanted.mean(1, keepdim=True))).double()
    found = bigrams.counts_N.sqrt()[:, None] * bias_of(small)[bigrams.tokens_N]
    best = torch.linalg.svdvals(wanted)[5:].square().sum()
    assert (wanted - found).square().sum().item() == pytest.approx(best.item(), rel=1e-4)


def test_heads_that_have_no_such_start_stay_as_they_are(target: Target) -> None:
    for drafter in (fresh(target, rank=4, head="rnn"), fresh(target)):
        before = {name: value.clone() for name, value in drafter.state_dict().items()}
        start_from_bigrams(drafter, example()[0], Vocabulary(torch.zeros(320, 48), torch.zeros(320, 48)))
        assert all(torch.equal(before[name], value) for name, value in drafter.state_dict().items())
