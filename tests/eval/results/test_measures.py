"""Divergences and figures against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_kvq.eval.engine.logprobs import Logprobs, divergence, joined
from vllm_kvq.eval.results.measures import Values, curve, mean, perplexity, quantile, root, step_edges

ROWS, VOCABULARY = 300, 40


def made_up(seed: int, near: np.ndarray | None = None) -> np.ndarray:
    """(rows, vocabulary) logarithms of probabilities."""
    logits = np.random.default_rng(seed).normal(size=(ROWS, VOCABULARY)) * 3
    logits = logits if near is None else near + 0.1 * logits
    return torch.from_numpy(logits).log_softmax(1).numpy().astype(np.float32)


def whole(values: np.ndarray) -> Logprobs:
    token = np.arange(ROWS) % VOCABULARY
    return Logprobs(token, values[np.arange(ROWS), token], values)


def cut(values: np.ndarray, k: int) -> Logprobs:
    """The k most probable tokens, as vLLM reports them."""
    ids = np.argsort(-values, 1)[:, :k]
    full = whole(values)
    return Logprobs(full.token, full.chosen, np.take_along_axis(values, ids, 1), ids)


P = made_up(0)
Q = made_up(1, P)


def test_the_whole_vocabulary_is_torchs_divergence() -> None:
    expected = torch.nn.functional.kl_div(torch.tensor(Q), torch.tensor(P), reduction="none", log_target=True).sum(1)
    assert divergence(whole(P), whole(Q)) == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-6)


def test_direction_matters() -> None:
    """The control: the divergence of the swapped pair is different."""
    assert abs(divergence(whole(P), whole(Q)) - divergence(whole(Q), whole(P))).max() > 1e-3


def test_nothing_differs_from_itself() -> None:
    for make in (whole, lambda x: cut(x, 5)):
        assert not divergence(make(P), make(P)).any()


@pytest.mark.parametrize("k", [1, 4, 16])
def test_the_most_probable_tokens_give_a_lower_bound(k: int) -> None:
    bound, exact = divergence(cut(P, k), cut(Q, k)), divergence(whole(P), whole(Q))
    assert (bound <= exact + 1e-6).all()
    assert bound.mean() > (0.2 if k == 1 else 0.7) * exact.mean()


def test_all_tokens_kept_is_no_bound() -> None:
    assert divergence(cut(P, VOCABULARY), cut(Q, VOCABULARY)) == pytest.approx(divergence(whole(P), whole(Q)), abs=1e-5)


def test_a_coarser_partition_by_hand() -> None:
    """p = (.5, .3, .1, .1), q = (.5, .1, .3, .1), two kept of each: the cells are token 0 and the rest."""
    p, q = (np.log(np.array([x], np.float32)) for x in ((0.5, 0.3, 0.1, 0.1), (0.5, 0.1, 0.3, 0.1)))
    ids = np.array([[0, 1]]), np.array([[0, 2]])
    kept = [Logprobs(np.array([0]), x[:, 0], np.take_along_axis(x, i, 1), i) for x, i in zip((p, q), ids, strict=True)]
    assert divergence(*kept) == pytest.approx([0], abs=1e-6)
    far = Logprobs(np.array([0]), q[:, 0], np.log(np.array([[0.25, 0.7]], np.float32)), ids[1])
    assert divergence(kept[0], far) == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)], rel=1e-5)


def test_other_tokens_cannot_be_compared() -> None:
    other = Logprobs(whole(P).token + 1, whole(P).chosen, P)
    for pair in ((whole(P), other), (whole(P), cut(P, 4))):
        with pytest.raises(ValueError, match="same tokens"):
            divergence(*pair)


class Flat:
    """Like vLLM's FlatLogprobs of a prompt: no row for the first token; each begins with the token that came."""

    start_indices, end_indices = [0, 0, 4], [0, 4, 8]
    token_ids = [2, 1, 0, 2, 0, 0, 2, 1]
    logprobs = [-3.0, -0.1, -2.0, -3.0, -0.5, -0.5, -1.0, -4.0]


def test_vllms_lists_by_token() -> None:
    found = Logprobs.of_flat(Flat, whole=True)
    assert found.token.tolist() == [2, 0]
    assert found.chosen.tolist() == [-3, -0.5]
    assert found.values == pytest.approx(np.array([[-2, -0.1, -3], [-0.5, -4, -1]]))
    assert found.best.tolist() == [1, 0]
    part = Logprobs.of_flat(Flat, whole=False)
    assert part.ids is not None
    assert part.ids.tolist() == [[1, 0, 2], [0, 2, 1]]
    assert part.best.tolist() == [1, 0]
    assert Logprobs.of(joined([part, part]).arrays()).ids is not None
    assert len(joined([found, found])) == 4


# -- figures ----------------------------------------------------------------------------------------------------------
def test_means_weigh_tokens_and_intervals_sequences() -> None:
    values = Values(np.array([1.0, 1, 1, 5]), np.array([0, 0, 0, 1]))
    estimate = mean(values)
    assert estimate.value == 2
    # what may be drawn: the first twice, both, the second twice
    assert (estimate.low, estimate.high) == (1, 5)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        level = rng.normal(size=20)
        values = Values((level[:, None] + rng.normal(size=(20, 50))).ravel(), np.repeat(np.arange(20), 50))
        estimate = mean(values)
        inside += estimate.low <= 0 <= estimate.high
    assert 0.88 <= inside / 200 <= 0.98


def test_tokens_are_not_taken_for_independent() -> None:
    """The control: if each token is a sequence of its own, the interval is far too narrow."""
    level = np.repeat(np.random.default_rng(0).normal(size=20), 50)
    right, wrong = (mean(Values(level, of)) for of in (np.repeat(np.arange(20), 50), np.arange(1000)))
    assert right.high - right.low > 4 * (wrong.high - wrong.low)


def test_one_sequence_has_no_interval() -> None:
    estimate = mean(Values(np.ones(3), np.zeros(3, int)))
    assert estimate.value == 1
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.999])
def test_quantiles(q: float) -> None:
    x = np.random.default_rng(0).normal(size=1000)
    found = quantile(Values(x, np.arange(1000) // 100), q)
    assert found.value == np.quantile(x, q, method="inverted_cdf")
    assert found.low <= found.value <= found.high


def test_a_quantiles_interval_draws_the_sequences_of_its_numbers() -> None:
    """The first twice: five; both, or the second twice: one."""
    found = quantile(Values(np.array([5.0, 1, 1, 1]), np.array([0, 1, 1, 1])), 0.5)
    assert (found.value, found.low, found.high) == (1, 1, 5)


def test_perplexity_and_root() -> None:
    logprob = Values(np.log([0.5, 0.125]), np.array([0, 1]))
    assert perplexity(logprob).value == pytest.approx(4)
    assert mean(Values(np.array([9.0, 16]), np.array([0, 1])), root).value == pytest.approx(12.5**0.5)


def test_curves_count_each_value_once() -> None:
    x = np.array([0.0, 1, 2, 3, 4])
    bins = curve(Values(x, np.arange(5)), x, np.array([0.0, 2, 3, 4]))
    assert [(b.begin, b.end, b.count, b.estimate.value) for b in bins] == [(0, 2, 2, 0.5), (2, 3, 1, 2), (3, 4, 2, 3.5)]
    assert [b.begin for b in curve(Values(x, np.arange(5)), x, np.array([-2.0, -1, 0, 9]))] == [0]


def test_steps_have_bins_of_their_own_where_they_are_few() -> None:
    assert step_edges(np.array([2, 5, 3])).tolist() == [2, 3, 4, 5, 6]
    assert len(step_edges(np.array([1, 400]))) == 9
