"""What only a GPU can show; skipped where there is none."""

import copy
import re
import signal

import pytest
import torch
from test_resume import start, wait_for
from test_script import SMALL, finished, run

import spirl_rainbow as spirl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"


def test_the_cache_equals_the_plain_map(trained_mae, random_play):
    mae = copy.deepcopy(trained_mae).to(DEVICE)
    cache = spirl.ErrorMapCache(mae)
    for frames in random_play.values():
        frames = torch.from_numpy(frames[100:500:20].copy()).to(DEVICE)
        plain = spirl.reconstruction_error_map(mae, frames)
        for _ in range(2):
            assert (cache(frames) - plain).abs().max() < 1e-4
        assert cache.misses == len(cache)


def test_the_compiled_update_is_the_plain_one():
    """With CUDA graphs: the same losses, gradients and priorities, update after update, up to rounding."""
    compiled = torch.compile(spirl.c51_loss, mode="reduce-overhead", dynamic=False)
    told = []
    for loss_function in (spirl.c51_loss, compiled):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            online, target = (spirl.RainbowNetwork(spirl.SalientPatchTransformer(), 128, 4) for _ in range(2))
            replay = spirl.Replay(64, (3, 64), torch.float16, DEVICE, 4, 3)
        for step in range(60):
            replay.append(torch.randn(3, 64).to(DEVICE), torch.tensor(step % 4, device=DEVICE), step % 9 == 0)
            replay.complete(step % 4, float(step % 3 - 1), step % 9 == 8)
        optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, eps=1.5e-4, fused=True)
        generator = torch.Generator(DEVICE).manual_seed(1)
        for _ in range(12):  # some to warm up, one to record the graph, the rest replay it
            metrics = spirl.learn(online, target, optimizer, replay, 8, 0.5, 10.0, generator, loss_function)
            told.append([metrics[name].item() for name in ("loss", "q", "grad_norm", "skipped")])
    for plain, graph in zip(told[:12], told[12:], strict=True):
        assert graph == pytest.approx(plain, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("script, flags", [
    ("spirl_rainbow.py", [*SMALL, "--compile"]),
    ("spirl_baselines.py", ["--method", "mae-all", *SMALL]),
    ("spirl_baselines.py", SMALL[SMALL.index("--max-episode-frames"):]),
])
def test_a_run_stops_goes_on_and_ends(tmp_path, script, flags):
    flags = [*flags, "--device", DEVICE, "--total-timesteps", "630", "--eval-frequency", "600"]
    process = start(tmp_path, script, *flags, "--run-name", "run")
    wait_for(process, "(?<!pre-)training: .*2[0-9][0-9]/")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and (tmp_path / "runs/run/checkpoint.pt").exists(), err
    done = run(tmp_path, "--resume", "runs/run", script=script)
    assert done.returncode == 0 and re.search("going on from step [2-5][0-9][0-9]", done.stdout), done.stderr[-3000:]
    assert (tmp_path / "runs/run/results.json").exists()


def test_the_auto_encoder_alone(tmp_path):
    flags = SMALL[: SMALL.index("--learning-starts")]
    path, results = finished(tmp_path, "mae", *flags, "--device", DEVICE, script="spirl_mae.py")
    assert results["device"] == f"{DEVICE}:0" and (path / "figures/mae_reconstruction.png").exists()
