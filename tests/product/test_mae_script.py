"""spirl_mae.py: what it leaves, what its figures show, and that its checkpoints travel between the scripts."""

import numpy as np
import pytest
import torch
from conftest import LOADED, SIZES, files, finished, in_background, run_here, scalars

import spirl_mae
import spirl_rainbow as spirl

# At slope 1/2 so weak a MAE finds nearly all salient, and no ratio is enough; at slope 0.9 it finds 16 to 18 of 36.
FRAMES = ["--mae-frames", "128", "--max-episode-frames", "600", "--lorenz-slope", "0.9"]
TRAINING = ["--mae-epochs", "6", "--mae-batch-size", "32", "--mae-learning-rate", "0.016"]


@in_background
def runs_of_a_mae(folder):
    """One that trains it, and spirl_rainbow.py with that mae.pt: the folder and the results of each."""
    trained = finished(folder, "trained", *SIZES, *FRAMES, *TRAINING, script="spirl_mae.py")
    played = finished(folder, "played", *LOADED, "--total-timesteps", "130", "--mae-checkpoint", trained[0] / "mae.pt")
    return trained, played


def test_a_run_leaves_what_the_readme_says(runs_of_a_mae):
    path, results = runs_of_a_mae[0]
    figures = {"mae_reconstruction", "salient_selection", "salient_patches", "max_ratio"}
    assert files(path) == {"args.json", "mae.pt", "results.json"} | {f"figures/{name}.png" for name in figures}
    losses = results["held_out_losses"]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert [step for step, _ in scalars(path / "mae")["mae/loss"]] == [*range(24)]
    counts = torch.load(path / "mae.pt", weights_only=True)["salient_counts"]["counts"]
    assert len(counts) == 128
    assert results["ideal_max_ratio"] == spirl.ideal_max_ratio(counts, 36)
    kept = sum(k <= int(36 * results["ideal_max_ratio"] + 1e-6) for k in counts.tolist()) / len(counts)
    assert results["kept_whole"] == pytest.approx(kept) and results["max_ratio"] == 0.35
    assert results["args"]["coverage"] == 0.999
    assert results["K"]["50%"] == int(np.median(counts))
    model = spirl.MaskedAutoencoder(image_size=48, encoder_depth=1, decoder_dim=32, decoder_depth=2)
    assert f"\n{sum(p.numel() for p in model.parameters()):,} parameters\n" in results["printed"]


def test_the_weights_travel_between_the_scripts(runs_of_a_mae, tmp_path, monkeypatch):
    (trained, results), (played, its_results) = runs_of_a_mae
    flags = [*SIZES, *FRAMES, "--mae-checkpoint", played / "mae.pt", "--coverage", 0.01, "--max-ratio", 0.4]
    end = run_here(tmp_path, monkeypatch, *flags, "--run-name", "looked", script="spirl_mae.py")
    folders = trained, played, tmp_path / "runs/looked"
    begun, *others = [torch.load(path / "mae.pt", weights_only=True) for path in folders]
    for other in others:  # bit for bit
        assert all(torch.equal(begun["model"][name], other["model"][name]) for name in begun["model"])
        assert torch.equal(begun["salient_counts"]["counts"], other["salient_counts"]["counts"])
    assert its_results["updates"] == 10
    assert all(other["args"] == begun["args"] for other in others)  # how it was made
    looked = end["results"]
    assert looked["held_out_losses"] == [] and looked["pretraining_seconds"] is None
    assert looked["K"] == results["K"]  # the same frames, seen by the same weights
    assert looked["max_ratio"] == 0.4 and looked["ideal_max_ratio"] < results["ideal_max_ratio"]
    frames = spirl_mae.collect_random_frames(end["args"], 128 + 256)
    assert torch.equal(end["frames"], frames[:128]) and torch.equal(end["held_out"], frames[128:])


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


def test_a_patch_is_painted_at_its_place():
    patches = torch.randn(9, 48)
    picture = spirl_mae.paint(patches, 3)
    for i, patch in enumerate(patches):
        expected = (0.5 + patch.view(4, 4, 3) / 5).clamp(0, 1)  # 0 is grey, 2.5 deviations are black or white
        np.testing.assert_allclose(picture[i // 3 * 4 :, i % 3 * 4 :][:4, :4], expected, atol=1e-6)


def test_the_reconstruction_figure(trained_mae, random_play, monkeypatch):
    frames = torch.from_numpy(random_play["ALE/MsPacman-v5"][::200].copy())
    monkeypatch.setattr(spirl_mae, "paint", lambda patches, side: patches.numpy())
    figure = spirl_mae.draw_reconstruction(trained_mae, frames)
    rebuilt = spirl_mae.rebuild_from_surroundings(trained_mae, frames)
    errors = spirl_mae.reconstruction_error_map(trained_mae, frames)
    rows = np.array(figure.axes[: 6 * len(frames)]).reshape(len(frames), 6)
    titles = [axis.get_title().split("\n")[-1] for axis in rows[0, 3:]]
    assert titles == ["[mask] + positions", "positions", "[mask]"]  # in the order of decoder_pictures
    for row, frame, patches, error in zip(rows, frames, rebuilt, errors, strict=True):
        expected = [frame, patches, error.view(12, 12), *spirl_mae.decoder_pictures(trained_mae)]
        for axis, picture in zip(row, expected, strict=True):
            assert np.array_equal(axis.get_images()[0].get_array(), picture)
        assert row[2].get_images()[0].get_clim() == (0, pytest.approx(errors.max().item()))  # one scale for all


def test_the_selection_figures(trained_mae, random_play, monkeypatch):
    marked = []  # the patches that are marked in each picture, as they are drawn
    monkeypatch.setattr(spirl_mae, "mark_patches", lambda frame, ids, *_: marked.append(set(ids)) or frame)
    frames = torch.from_numpy(random_play["ALE/Seaquest-v5"][::34].copy())
    errors = spirl_mae.ErrorMapCache(trained_mae)(frames)
    patch_ids, count = spirl.select_salient_patches(errors, 144, 1.0)
    figure = spirl_mae.draw_selection(trained_mae, frames[:3], errors[:3], (0.2, 0.1), 1.0)
    columns = np.array(figure.axes).reshape(4, 3).T
    for (curve, *pictures), frame, error, ids, k in zip(columns, frames, errors, patch_ids.tolist(), count.tolist()):
        ascending = sorted(error.tolist())
        line, tangent, point = curve.get_lines()
        assert tangent.get_slope() == 1.0
        for n in (0, 1, 70, 144):
            assert line.get_xdata()[n] == pytest.approx(n / 144)
            assert line.get_ydata()[n] == pytest.approx(sum(ascending[:n]) / sum(ascending), abs=1e-5)
        assert point.get_xdata() == [pytest.approx(1 - k / 144)] and curve.get_title() == f"K = {k} of 144"
        kept = curve.patches[0]  # from the cut to the right end
        assert [kept.get_x(), kept.get_x() + kept.get_width()] == pytest.approx([1 - k / 144, 1])
        for picture, most in zip(pictures, (k, 28, 14), strict=True):
            assert marked.pop(0) == set(ids[:most])
            assert np.array_equal(picture.get_images()[0].get_array(), frame)
            assert picture.get_title().endswith(f" {most}")
    legend = [text.get_text().split()[0] for text in figure.legends[0].get_texts()]
    assert legend == ["Lorenz", "slope", "the", "kept"]  # each once, not in each column

    most = int(count.float().mean())
    figure = spirl_mae.draw_salient_patches(trained_mae, frames, errors, most, 1.0)
    assert f"at most {most}" in figure.get_suptitle()
    seen = [min(k, most) for k in count.tolist()]
    assert marked == [set(ids[:k]) for ids, k in zip(patch_ids.tolist(), seen)] and min(seen) < most
    assert all(f"{k} of 144" in axis.get_title() for axis, k in zip(figure.axes, seen))


def test_selected_patches_are_red_attended_ones_yellow_and_others_dark():
    frame = np.full((16, 16, 3), 7, np.uint8)
    picture = spirl.mark_patches(frame, [1, 2], [2], 2)
    for i, colour in enumerate([(2, 2, 2), (255, 0, 0), (255, 255, 0), (2, 2, 2)]):
        patch = picture[i // 2 * 32 :, i % 2 * 32 :][:32, :32]
        assert patch.shape == (32, 32, 3) and (patch[2:-2, 2:-2] == (7 if i in (1, 2) else 2)).all()
        for edge in (patch[:2], patch[-2:], patch[:, :2], patch[:, -2:]):
            assert (edge == colour).all(), i
    assert (frame == 7).all()


def test_the_max_ratio_figure():
    counts = torch.tensor([7] * 30 + [8] * 50 + [50] * 15 + [51] * 5)  # 5 % keeps 7, 10 % keeps 14, 35 % 50, 40 % 57
    figure = spirl_mae.draw_max_ratio(counts, 144, 0.40, 0.35, "Frostbite")
    axis = figure.axes[0]
    heights = {round(bar.get_x() + bar.get_width() / 2, 2): bar.get_height() for bar in axis.patches}
    heights = {x: height for x, height in heights.items() if height > 1e-9}
    assert heights == pytest.approx({2.5: 30.0, 7.5: 50.0, 32.5: 15.0, 37.5: 5.0})
    assert [line.get_xdata()[0] for line in axis.get_lines()] == [40.0, 35.0]
    ideal, in_use = (text.get_text() for text in figure.legends[0].get_texts())
    assert ideal.startswith("mr* = 40 %: 100.00 %") and in_use.startswith("maximal ratio in use = 35 %: 95.00 %")
