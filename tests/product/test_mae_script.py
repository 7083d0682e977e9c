"""spirl_mae.py: what its figures show, that it repeats itself, and that its checkpoints travel between the scripts."""

import contextlib
import json

import numpy as np
import pytest
import torch
from conftest import LOADED, SMALL, finished, in_background, run
from matplotlib.figure import Figure

import spirl_mae
import spirl_rainbow as spirl

# As SMALL, but trained long enough that K differs from frame to frame.
SIZES = SMALL[: SMALL.index("--mae-frames")] + [
    "--mae-frames", "128", "--max-episode-frames", "600", "--threads", "1", "--device", "cpu"]
TRAINING = ["--mae-epochs", "6", "--mae-batch-size", "32", "--mae-learning-rate", "0.016"]


def mae_run(folder, name, *flags):
    training = [] if "--mae-checkpoint" in flags else TRAINING
    done = run(folder, *SIZES, *training, *flags, "--run-name", name, script="spirl_mae.py")
    assert done.returncode == 0, done.stderr[-3000:]
    path = folder / "runs" / name
    return path, json.loads((path / "results.json").read_text()), done.stdout


@in_background
def first(folder):
    return mae_run(folder, "first")


@in_background
def again(folder):
    """The same once more; its mae.pt in spirl_rainbow.py, and what that leaves in spirl_mae.py."""
    second = mae_run(folder, "second")
    played = finished(folder, "played", *LOADED, "--total-timesteps", "130", "--mae-checkpoint", second[0] / "mae.pt")
    return second, played, mae_run(folder, "looked", "--mae-checkpoint", played[0] / "mae.pt")


def test_a_run_leaves_what_the_readme_says(first):
    path, results, printed = first
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and "tfevents" not in file.name}
    figures = {"mae_reconstruction", "salient_selection", "salient_patches", "max_ratio"}
    assert names == {"args.json", "mae.pt", "results.json"} | {f"figures/{name}.png" for name in figures}
    assert results["steps"] == 24 and len(results["held_out_losses"]) == 6
    assert results["held_out_losses"][-1] < results["held_out_losses"][0]
    counts = torch.load(path / "mae.pt", weights_only=True)["salient_counts"]["counts"]
    assert len(counts) == 128
    assert results["ideal_max_ratio"] == spirl.ideal_max_ratio(counts, 36)
    for percent, share in results["kept_whole"].items():
        kept = sum(k <= int(36 * int(percent) / 100 + 1e-6) for k in counts.tolist()) / len(counts)
        assert share == pytest.approx(kept)
    assert results["K"]["50%"] == int(np.median(counts))
    model = spirl.MaskedAutoencoder(image_size=48, encoder_depth=1, decoder_dim=32, decoder_depth=2)
    assert f"\n{sum(p.numel() for p in model.parameters()):,} parameters\n" in printed


def test_the_same_seed_gives_the_same_weights_bit_for_bit(first, again):
    states = [torch.load(path / "mae.pt", weights_only=True) for path, *_ in (first, again[0])]
    assert all(torch.equal(states[0]["model"][name], states[1]["model"][name]) for name in states[0]["model"])
    assert torch.equal(states[0]["salient_counts"]["counts"], states[1]["salient_counts"]["counts"])


def test_checkpoints_travel_between_the_scripts(first, again):
    _, (played, results), (looked, seen, _) = again
    assert results["updates"] == 10
    assert seen["steps"] == 0 and seen["pretraining_seconds"] is None
    begun, *others = [torch.load(path / "mae.pt", weights_only=True) for path in (first[0], played, looked)]
    for other in others:
        assert all(torch.equal(begun["model"][name], other["model"][name]) for name in begun["model"])
        assert torch.equal(begun["salient_counts"]["counts"], other["salient_counts"]["counts"])
    assert others[0]["args"] == begun["args"] | {"run_name": "second"}  # a copy: how it was made
    assert others[1]["args"]["mae_checkpoint"] == str(played / "mae.pt")
    assert seen["K"] == first[1]["K"]  # the same frames, seen by the same weights


def test_decoder_pictures_are_of_patch_tokens_alone(trained_mae):
    """As the authors' pred_decoder: the same as beside a [cls] that no patch attends to, whatever is in it."""
    both, positions, mask = spirl_mae.decoder_pictures(trained_mae)
    patches = trained_mae.mask_token + trained_mae.decoder_pos_embed[:, 1:]
    x = torch.cat([patches[:, :1], torch.randn(1, 1, 128), patches[:, 1:]], 1)  # in second place: the first is attended
    for block in trained_mae.decoder_blocks:
        x = block(x, torch.arange(1, 145)[None] > 1)
    expected = trained_mae.decoder_pred(trained_mae.decoder_norm(x))[0, torch.arange(145) != 1]
    torch.testing.assert_close(both, expected, rtol=1e-4, atol=1e-4)
    assert (both - positions).abs().max() > 1e-3 and (both - mask).abs().max() > 1e-3
    assert (mask - mask[0]).abs().max() < 1e-4  # without positions every patch is the same


@pytest.fixture
def drawn(monkeypatch):
    """Figures as the script draws them, kept for a look instead of being written."""
    figures = []
    monkeypatch.setattr(spirl_mae, "atomic", contextlib.nullcontext)
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    return figures


def images(axis):
    return np.asarray(axis.get_images()[0].get_array())


def test_the_reconstruction_figure(trained_mae, random_play, drawn):
    frames = torch.from_numpy(random_play["ALE/MsPacman-v5"][::200].copy())
    spirl_mae.draw_reconstruction(trained_mae, frames, None)
    axes = np.array(drawn[0].axes[: 6 * len(frames)]).reshape(len(frames), 6)
    titles = [axis.get_title().replace("\n", " ") for axis in axes[0]]
    assert titles == [
        "frame", "each patch guessed from those around it", "error of the guess (bright: large)",
        "seeing nothing but [mask] + positions", "seeing nothing but positions", "seeing nothing but [mask]"]
    rebuilt = spirl_mae.rebuild_from_surroundings(trained_mae, frames)
    errors = spirl_mae.reconstruction_error_map(trained_mae, frames)
    target = spirl.normalize_patches(trained_mae.patchify(frames))
    torch.testing.assert_close((rebuilt - target).square().mean(2), errors, rtol=1e-5, atol=1e-6)
    for row, frame, patches, error in zip(axes, frames, rebuilt, errors):
        assert (images(row[0]) == frame.numpy()).all()
        for i in (0, 5, 143):  # a patch of the picture is that patch, at its place
            at = (slice(i // 12 * 8, i // 12 * 8 + 8), slice(i % 12 * 8, i % 12 * 8 + 8))
            expected = (0.5 + patches[i].unflatten(0, (8, 8, 3)) / 5).clamp(0, 1)
            np.testing.assert_allclose(images(row[1])[at], expected, atol=1e-6)
        assert images(row[2]).reshape(-1).tolist() == error.tolist()
        assert row[2].get_images()[0].get_clim() == (0, pytest.approx(errors.max().item()))  # one scale for all
        for axis, picture in zip(row[3:], spirl_mae.decoder_pictures(trained_mae)):
            for i in (0, 77):
                at = (slice(i // 12 * 8, i // 12 * 8 + 8), slice(i % 12 * 8, i % 12 * 8 + 8))
                expected = (0.5 + picture[i].unflatten(0, (8, 8, 3)) / 5).clamp(0, 1)
                np.testing.assert_allclose(images(axis)[at], expected, atol=1e-6)


def is_marked(picture, i, side=12):
    """Whether patch i of a picture has a red frame."""
    size = len(picture) // side
    square = picture[i // side * size : (i // side + 1) * size, i % side * size : (i % side + 1) * size]
    return (square[0] == (255, 0, 0)).all() and (square[:, -1] == (255, 0, 0)).all()


def test_the_selection_figures(trained_mae, random_play, drawn):
    frames = torch.from_numpy(random_play["ALE/Seaquest-v5"][::34].copy())
    errors = spirl_mae.ErrorMapCache(trained_mae)(frames)
    patch_ids, count = spirl.select_salient_patches(errors, 144)
    spirl_mae.draw_selection(trained_mae, frames[:3], errors[:3], (0.2, 0.1), 0.5, None)
    axes = np.array(drawn[0].axes).reshape(4, 3)
    for column in range(3):
        k, order = int(count[column]), patch_ids[column].tolist()
        ascending = sorted(errors[column].tolist())
        line, tangent, point = axes[0, column].get_lines()
        assert tangent.get_slope() == 0.5
        for n in (0, 1, 70, 144):
            assert line.get_xdata()[n] == pytest.approx(n / 144)
            assert line.get_ydata()[n] == pytest.approx(sum(ascending[:n]) / sum(ascending), abs=1e-5)
        assert point.get_xdata() == [pytest.approx(1 - k / 144)] and axes[0, column].get_title() == f"K = {k} of 144"
        kept = axes[0, column].patches[0]  # from the cut to the right end
        assert [kept.get_x(), kept.get_x() + kept.get_width()] == pytest.approx([1 - k / 144, 1])
        for axis, kept in zip(axes[1:, column], (k, 28, 14)):
            assert axis.get_title().endswith(f" {kept}")
            assert {i for i in range(144) if is_marked(images(axis), i)} == set(order[:kept])
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert [name.split()[0] for name in legend] == ["Lorenz", "slope", "the", "kept"]  # each once, not in each column
    spirl_mae.draw_salient_patches(trained_mae, frames, errors, 28, 0.5, None)
    assert "at most 28" in drawn[1].get_suptitle()
    capped_ids, capped = spirl.select_salient_patches(errors, 28)
    for axis, ids, k in zip(drawn[1].axes, capped_ids.tolist(), capped.tolist()):
        assert {i for i in range(144) if is_marked(images(axis), i)} == set(ids[:k])
        assert f"{k} of 144" in axis.get_title()


def test_selected_patches_are_red_and_attended_ones_yellow():
    frame = np.full((16, 16, 3), 7, np.uint8)
    picture = spirl.mark_patches(frame, [1, 2], [2], 2)
    for i, colour in enumerate([(7, 7, 7), (255, 0, 0), (255, 255, 0), (7, 7, 7)]):
        patch = picture[i // 2 * 32 :, i % 2 * 32 :][:32, :32]
        assert patch.shape == (32, 32, 3) and (patch[2:-2, 2:-2] == 7).all()
        for edge in (patch[:2], patch[-2:], patch[:, :2], patch[:, -2:]):
            assert (edge == colour).all(), i
    assert (frame == 7).all()


def test_the_max_ratio_figure(drawn):
    counts = torch.tensor([7] * 30 + [8] * 50 + [50] * 15 + [51] * 5)  # 5 % keeps 7, 10 % keeps 14, 35 % 50, 40 % 57
    spirl_mae.draw_max_ratio(counts, 144, 0.40, 0.35, "Frostbite", None)
    axis = drawn[0].axes[0]
    heights = {round(bar.get_x() + bar.get_width() / 2, 2): bar.get_height() for bar in axis.patches}
    assert {x: height for x, height in heights.items() if height > 1e-9} == pytest.approx(
        {2.5: 30.0, 7.5: 50.0, 32.5: 15.0, 37.5: 5.0})
    assert [line.get_xdata()[0] for line in axis.get_lines()] == [40.0, 35.0]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        "mr* = 40 %: 100.00 % of the frames lose no salient patch",
        "maximal ratio in use = 35 %: 95.00 % of the frames lose no salient patch"]
