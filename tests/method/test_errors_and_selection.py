"""What is salient: the error map, its cache, dynamic-K, mr* and the embeddings, against loops and on real frames."""

from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import GAMES

import spirl_mae
import spirl_rainbow as spirl


def oracle_error_map(mae, frame):
    """E_ij of one frame, patch by patch: Eq. (3), then the mean squared difference to the normalised patch."""
    p, side = mae.patch_size, mae.side
    squares = [frame[i * p :, j * p :][:p, :p].flatten() / 255 for i in range(side) for j in range(side)]
    E = []
    for i, j in product(range(side), repeat=2):
        around = [(k, m) for k in (i - 1, i, i + 1) for m in (j - 1, j, j + 1) if (k, m) != (i, j)]
        places = [k * side + m for k, m in around if 0 <= k < side and 0 <= m < side]  # surr(X_ij), up to eight
        seen, ids = torch.stack([squares[place] for place in places]), torch.tensor([places])
        rebuilt = mae.decode(mae.encode(seen[None], ids), ids)[0, i * side + j].double()
        patch = squares[i * side + j].double()
        normalised = (patch - patch.mean()) / (patch.var(unbiased=True) + 1e-6).sqrt()
        E.append(sum((a - b) ** 2 for a, b in zip(normalised.tolist(), rebuilt.tolist())) / len(patch))
    return torch.tensor(E)


@pytest.mark.parametrize("depth", [1, 2])
def test_error_maps_against_loops(depth):
    torch.manual_seed(depth)
    mae = spirl.MaskedAutoencoder(image_size=32, encoder_depth=2, decoder_depth=depth).eval().requires_grad_(False)
    for p in mae.parameters():  # larger weights than at the start: attention that is far from uniform
        p.add_(torch.randn_like(p) * 0.15)
    frames = torch.randint(256, (3, 32, 32, 3), dtype=torch.uint8)
    frames[0, :16, :16] = 7  # as in games, patches of one colour, alone and among others,
    frames[1, 8:16, 8:16] = 7 + frames[1, 8:16, 8:16] // 128  # and nearly of one
    expected = torch.stack([oracle_error_map(mae, frame) for frame in frames])
    for errors in (spirl_mae.reconstruction_error_map(mae, frames), spirl.ErrorMapCache(mae)(frames)):
        torch.testing.assert_close(errors, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="session")
def plain_maps(maes, random_play):
    """10 frames of each game, spread over the random play, and their plain error maps."""
    frames = {game: torch.from_numpy(random_play[game][7::40].copy()) for game in GAMES}
    return {game: (frames[game], spirl_mae.reconstruction_error_map(maes[game], frames[game])) for game in GAMES}


@pytest.mark.parametrize("game", GAMES)
def test_the_cache_equals_the_plain_map_and_computes_each_neighbourhood_once(maes, plain_maps, game):
    frames, plain = plain_maps[game]
    padded = np.pad(frames.numpy().astype(np.int16), ((0, 0), (8, 8), (8, 8), (0, 0)), constant_values=-1)
    places = product(padded, range(0, 96, 8), range(0, 96, 8))
    neighbourhoods = {(i, j, frame[i : i + 24, j : j + 24].tobytes()) for frame, i, j in places}
    cache = spirl.ErrorMapCache(maes[game])
    cache.compute = Mock(side_effect=cache.compute)
    cold = torch.cat([cache(batch) for batch in frames.split(7)])
    assert (cold - plain).abs().max() < 1e-5 and torch.equal(cache(frames), cold)
    computed = sum(len(call.args[1]) for call in cache.compute.call_args_list)
    assert computed == len(cache.errors) == len(neighbourhoods)


def test_a_full_table_forgets_the_oldest_and_stays_right(trained_mae, plain_maps):
    frames, plain = plain_maps["ALE/Frostbite-v5"]
    cache, keys = spirl.ErrorMapCache(trained_mae, 100), []  # a frame alone has 144
    for frame, expected in zip(frames[:3], plain):
        assert (cache(frame[None])[0] - expected).abs().max() < 1e-5
        keys = list(dict.fromkeys(keys + cache.hashes(frame[None])))[-100:]
        assert list(cache.errors) == keys


def oracle_selection(errors, max_patches, lorenz_slope):
    """Dynamic-K of one frame in loops: the K of the closest slope, at most max_patches."""
    N = len(errors)
    order = sorted(range(N), key=lambda n: (-errors[n], n))
    if lorenz_slope is None:
        return order[:max_patches]
    if max(errors) == min(errors):
        return order[:1]
    v = [error / sum(errors) for error in sorted(errors)]
    i = min(range(1, N - 1), key=lambda i: abs((v[i] + v[i + 1]) * N / 2 - lorenz_slope))  # the first of equals
    return order[: min(N - i, max_patches)]


@pytest.mark.parametrize("slope", [None, 0.5, 1.0])
@pytest.mark.parametrize("max_patches", [1, 2, 3, 10, 36])
def test_selection_against_loops(slope, max_patches):
    rng, errors = np.random.default_rng(0), np.full((104, 36), 0.01, np.float32)
    errors[:50] = rng.exponential(size=(50, 36))
    errors[50:100] = rng.integers(1, 4, (50, 36))  # ties
    errors[100:103] = [[0.3], [0.0], [0.0]]  # constant: K = 1
    errors[102, 20] = errors[103, 35] = 7.0  # outliers
    patch_ids, count = spirl.select_salient_patches(torch.from_numpy(errors), max_patches, slope)
    for row, ids, k in zip(errors.tolist(), patch_ids.tolist(), count.tolist(), strict=True):
        selected = oracle_selection(row, max_patches, slope)
        assert (ids[:k], k) == (selected, len(selected)) and len(set(ids)) == max_patches


def test_selection_by_hand():
    # v = 1/16 x4, 2/16, 10/16 (N = 6); slopes (v_i + v_{i+1}) * 3: 6/16, 6/16, 6/16, 9/16, 36/16
    errors = torch.tensor([[1.0, 10.0, 1.0, 2.0, 1.0, 1.0]])
    ids, count = spirl.select_salient_patches(errors, 6, 0.5)  # closest to 8/16: 9/16 at i = 3
    assert count.tolist() == [3] and ids[0, :3].tolist() == [1, 3, 0]
    for wrong in (0, 7):
        with pytest.raises(ValueError, match="max_patches"):
            spirl.select_salient_patches(errors, wrong)


def test_embeddings_are_the_encoder_on_the_selected_patches_alone(trained_mae, plain_maps):
    frames, errors = (x[:4] for x in plain_maps["ALE/Frostbite-v5"])
    patch_ids, count = spirl.select_salient_patches(errors, 144)
    count = torch.minimum(count, torch.tensor([144, 20, 1, 0]))  # K as it is, cut to 20, to 1, to none
    embeddings = spirl.encode_patches(trained_mae, frames, patch_ids, count)
    assert embeddings.shape == (4, 144, 64)
    for frame, ids, k, got in zip(frames, patch_ids, count.tolist(), embeddings):
        ids = ids[:k][None]
        patches = trained_mae.patchify(frame[None])[:, ids[0]]
        expected = trained_mae.encode(patches, ids)[0, 1:] + trained_mae.pos_embed[0, 1 + ids[0]]
        torch.testing.assert_close(got[:k], expected, rtol=1e-4, atol=1e-5)
        assert not got[k:].any()


def test_ideal_max_ratio_at_its_boundary():
    counts = torch.full((10_000,), 7)  # int(144 * 5 %) = 7
    counts[:9] = 100  # 9,991 of 10,000 is more than 99.9 %
    assert spirl.ideal_max_ratio(counts, 144) == 0.05
    counts[:10] = 100  # 9,990 is not: the ratio that holds 100 of 144 is 70 % (100.8)
    assert spirl.ideal_max_ratio(counts, 144) == 0.70
    assert spirl.ideal_max_ratio(torch.full((5,), 144), 144) == 0.95
    assert spirl.ideal_max_ratio(torch.tensor([7, 7, 7, 50]), 144, coverage=0.7) == 0.05


def test_of_ten_thousand_frames_every_second_is_counted_without_a_maximum():
    mae = spirl.MaskedAutoencoder(24, encoder_depth=1, decoder_dim=32, decoder_depth=1).eval().requires_grad_(False)
    frames, rng = torch.zeros(10_000, 24, 24, 3, dtype=torch.uint8), np.random.default_rng(0)
    for i in rng.integers(10_000, size=300):
        side = rng.integers(1, 25)
        frames[i, :side, :side] = torch.from_numpy(rng.integers(256, size=(side, side, 3)))
    counted = spirl.count_salient_patches(mae, frames, 1.0)
    _, expected = spirl.select_salient_patches(spirl.ErrorMapCache(mae)(frames[::2]), 9, 1.0)
    assert counted["lorenz_slope"] == 1.0 and len(set(expected.tolist())) > 1
    assert counted["counts"].tolist() == expected.tolist()


def test_the_papers_ratios_in_patches():
    kept = [spirl.ratio_to_patches(spirl.PAPER_MAX_RATIO[game], 144) for game in GAMES]
    assert kept == [50, 43, 28, 43]
    assert all(spirl.ratio_to_patches(k / n, n) == k for n in (36, 100, 144) for k in range(n + 1))
