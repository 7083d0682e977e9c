"""How fast the scripts are, and whether the fast error map is the plain one: Markdown tables on the terminal.

    python tests/benchmarks/benchmark.py                                # everything, some hours on a CPU
    python tests/benchmarks/benchmark.py --only error-map --every 10    # the plain error map on every tenth frame
    python tests/benchmarks/benchmark.py --only update step

Times on a shared machine are noisy: compare figures of one run with each other, and with the matrix rate beside them.
"""

import functools
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import spirl_baselines as baselines  # noqa: E402
import spirl_mae  # noqa: E402
import spirl_rainbow as spirl  # noqa: E402

GAMES = ("Frostbite", "Seaquest", "MsPacman", "BattleZone")
SECTIONS = ("error-map", "update", "step", "pretraining", "growth", "threads")


@dataclass
class Args:
    only: tuple[Literal["error-map", "update", "step", "pretraining", "growth", "threads"], ...] = SECTIONS
    """which measurements to make"""
    games: tuple[str, ...] = GAMES
    """games whose error maps are compared"""
    frames: int = 3000
    """consecutive frames of random play for the error maps; the first third of them is not counted in the ratio"""
    every: int = 1
    """the plain error map is computed on every such frame (the cached one on all)"""
    steps: int = 2000
    """steps of the training runs of `step` and `threads`, the first 100 of them random"""
    threads: int = 1
    """CPU threads of PyTorch"""
    device: str = "auto"
    """as in the scripts"""


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(function, device, repeats=50, warmup=10):
    """The median time of a call."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


def matrix_rate(device):
    """The machine's rate of float32 matrix products here and now, in GFLOP/s."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device)
    return 2 * n**3 / milliseconds(lambda: a @ a, device, 20) / 1e6


def random_frames(game, count):
    """`count` consecutive frames of random play in one environment, game after game, (count, 96, 96, 3) uint8."""
    return spirl.collect_random_frames(spirl.Args(env_id=f"ALE/{game}-v5"), count)


def weights(game):
    """The file of a trained MAE of this game."""
    return ROOT / f"tests/weights/{game}.pt"


def error_map(args, device):
    """The plain error map against the cached one, from an empty table."""
    print("| game | plain, ms a frame | plain in batches of 8 | cached, ms a frame | ratio of first and third | "
          "new neighbourhoods a frame, by sixths of all | largest difference | frames with another K | "
          "machine's matrix rate, GFLOP/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for game in args.games:
        mae = spirl.MaskedAutoencoder().to(device)
        mae.load_state_dict(torch.load(weights(game), map_location=device, weights_only=True)["model"])
        mae.eval().requires_grad_(False)
        frames = random_frames(game, args.frames).to(device)
        cache, misses, plain_seconds, cached_seconds, largest, other_k, near, compared = (
            spirl.ErrorMapCache(mae), [], [], [], 0.0, 0, 0, 0)
        rates = [matrix_rate(device)]
        for i, frame in enumerate(frames):
            before = len(cache.errors)
            start = time.perf_counter()
            cached = cache(frame[None])
            synchronize(device)
            late = i >= args.frames // 3  # the ratio leaves the start out, where almost every neighbourhood is new
            if late:
                cached_seconds.append(time.perf_counter() - start)
            misses.append(len(cache.errors) - before)
            if i % args.every:
                continue
            start = time.perf_counter()
            plain = spirl_mae.reconstruction_error_map(mae, frame[None])
            synchronize(device)
            if late:
                plain_seconds.append(time.perf_counter() - start)
            plain = plain.cpu()  # as the cached errors are
            compared += 1
            largest = max(largest, (plain - cached).abs().max().item())
            counts = [int(spirl.select_salient_patches(errors, 144)[1]) for errors in (plain, cached)]
            if counts[0] != counts[1]:  # two slopes that are as good as equally close
                other_k += 1
                v = plain.double().sort(1).values[0] / plain.double().sum()
                distances = ((v[:-1] + v[1:]) * 72 - 0.5).abs()  # of each i's two-step slope from 1/2; K = 144 - i
                near += abs(distances[144 - counts[0]] - distances[144 - counts[1]]) < 1e-5
        rates.append(matrix_rate(device))
        plain, cached = 1000 * np.mean(plain_seconds), 1000 * np.mean(cached_seconds)
        eight = frames[:8]
        batched = milliseconds(lambda: spirl_mae.reconstruction_error_map(mae, eight), device, 3, 1) / 8  # noqa: B023
        sixths = ", ".join(f"{part.mean():.1f}" for part in np.array_split(np.array(misses), 6))
        print(f"| {game} | {plain:.0f} | {batched:.0f} | {cached:.1f} | {plain / cached:.1f} | {sixths} | "
              f"{largest:.1e} | {other_k} of {compared}, {int(near)} near-ties | "
              f"{min(rates):.0f} to {max(rates):.0f} |", flush=True)


def learner(device, patches=None, capacity=100_000):
    """What an update needs, with a replay full of random content: SPIRL's of so many patches, or DE-Rainbow's."""
    with torch.device(device):
        trunk = lambda: spirl.SalientPatchTransformer() if patches else baselines.DataEfficientCNN()  # noqa: E731
        online, target = (spirl.RainbowNetwork(trunk(), 128 if patches else 1024, 18) for _ in range(2))
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, eps=1.5e-4, fused=True)
    shape, dtype = ((patches, 64), torch.float16) if patches else ((84, 84), torch.uint8)
    replay = spirl.Replay(capacity, shape, dtype, device)
    replay.frames.random_(0, 2)
    replay.counts.fill_(patches or 1)
    replay.actions.random_(0, 18)
    replay.rewards.bernoulli_(0.05)
    replay.priorities.uniform_(0.01, 1)
    replay.life_ids.copy_((torch.rand(capacity, device=device) < 0.005).cumsum(0))
    return online, target.requires_grad_(False), optimizer, replay, torch.Generator(device).manual_seed(1)


def update(args, device):
    """The update alone, by number of patches."""
    print("| update of | plain, ms | --compile, ms | machine's matrix rate, GFLOP/s |\n|---|---|---|---|")
    for patches in (28, 43, 50, 144, None):
        torch._dynamo.reset()  # one shape at a time, as in a run
        times = []
        plain = spirl.c51_loss
        for spirl.c51_loss in (plain, torch.compile(plain, dynamic=False)):
            online, target, optimizer, replay, generator = learner(device, patches)
            learn = functools.partial(spirl.learn, spirl.Args(), online, target, optimizer, replay, 0.5, generator)
            times.append(milliseconds(learn, device, 100))
        spirl.c51_loss = plain
        name = f"{patches} patches" if patches else "DE-Rainbow"
        print(f"| {name} | {times[0]:.1f} | {times[1]:.1f} | {matrix_rate(device):.0f} |", flush=True)
        if patches == 28:
            with profile() as profiler:
                for _ in range(20):
                    spirl.learn(spirl.Args(), online, target, optimizer, replay, 0.5, generator)
    print()
    shares(profiler)


def start_run(folder, args, script, *flags, threads=None):
    name = f"run{len(list(folder.glob('*.log')))}"
    command = [sys.executable, ROOT / script, "--run-name", name, "--eval-episodes", "1", "--max-episode-frames",
               "1600", "--total-timesteps", args.steps, "--learning-starts", "100", "--device", args.device,
               "--threads", threads or args.threads, *flags]
    log = (folder / f"{name}.log").open("w")
    process = subprocess.Popen([str(part) for part in command], cwd=folder, stdout=log, stderr=log)
    return process, folder / "runs" / name / "results.json", folder / f"{name}.log"


def finish_run(run):
    process, path, log = run
    if process.wait():
        raise SystemExit(f"a run failed:\n{log.read_text()[-2000:]}")
    return json.loads(path.read_text())


def rate(results):
    """Steps a second of a run, one short evaluation game included."""
    return results["steps"] / results["training_seconds"]


def step(args, device):
    """Training steps a second of whole runs of the scripts on Frostbite, from an empty error table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, mae = Path(temporary), weights("Frostbite")
        print("| method | steps a second |\n|---|---|")
        for name, script, flags in (
            ("SPIRL", "spirl_rainbow.py", ["--mae-checkpoint", mae]),
            ("MAE-All", "spirl_baselines.py", ["--method", "mae-all", "--mae-checkpoint", mae]),
            ("DE-Rainbow", "spirl_baselines.py", []),
        ):
            print(f"| {name} | {rate(finish_run(start_run(folder, args, script, *flags))):.1f} |", flush=True)


def peak_memory(device):
    """The most that this process has held, in GB; on a GPU, of the GPU's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def gflop(function):
    """Floating-point operations of a call, in 1e9."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # which counts no fused attention
        function()
    return counter.get_total_flops() / 1e9


def pretraining(args, device):
    """Pre-training, stage by stage, and its share of the machine's matrix-product rate."""
    with torch.device(device):
        mae = spirl.MaskedAutoencoder()
    optimizer = torch.optim.AdamW(mae.parameters(), lr=1e-4, fused=True)
    played = random_frames("Frostbite", 1280)
    frames = played[:64].to(device)
    masks = torch.Generator(device).manual_seed(1)
    patches = mae.patchify(frames)
    kept = torch.rand(64, 144, device=device).argsort(1)[:, :36]
    model = mae

    def forward():
        return model(frames, 0.75, masks)[0]

    def train():
        loss = forward()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    train()
    seen = patches.take_along_dim(kept[..., None], 1)
    latent = mae.encode(seen, kept).detach()
    whole = "all, forward and backward and AdamW"
    stages = {
        "patches of the frames": lambda: mae.patchify(frames),
        "their normalised pixels": lambda: spirl.normalize_patches(patches),
        "encoder, forward": lambda: mae.encode(seen, kept),
        "decoder, forward": lambda: mae.decode(latent, kept),
        "all, forward": forward,
        "AdamW": optimizer.step,
        whole: train,
    }
    work, times, rates = {}, {}, [matrix_rate(device)]
    print("| of a batch of 64 | ms | GFLOP/s |\n|---|---|---|")
    for name, stage in stages.items():
        work[name], times[name] = gflop(stage), milliseconds(stage, device, 10, 2)
        print(f"| {name} | {times[name]:.1f} | {1000 * work[name] / times[name]:.0f} |", flush=True)
    rates.append(matrix_rate(device))
    model = torch.compile(mae)
    print(f"| the same, compiled | {milliseconds(train, device, 10, 2):.1f} | |")
    model = mae
    settings = spirl.Args(mae_epochs=1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        spirl.pretrain_mae(settings, mae, played, played[:64], Path(folder))
    epoch, ms, rate = time.perf_counter() - start, times[whole], np.mean(rates)
    print(f"\n{work[whole]:.1f} GFLOP a batch, {1000 * work[whole] / ms:.0f} GFLOP/s: "
          f"{100000 * work[whole] / ms / rate:.0f} % of the machine's {rates[0]:.0f} before and {rates[1]:.0f} after. "
          f"`pretrain_mae` itself: {1280 / epoch:.0f} images a second over an epoch of 1,280, held-out loss included; "
          f"the batch alone would make {64000 / ms:.0f}. Peak memory of this process so far: {peak_memory(device):.2f} "
          "GB.\n")
    with profile() as profiler:
        for _ in range(4):
            train()
    shares(profiler)


def shares(profiler):
    """The operators that take the most time of a profile."""
    rows = [row for row in profiler.key_averages() if not row.is_user_annotation]
    kernels = [row for row in rows if row.device_type != DeviceType.CPU]  # on a GPU: what the CPU does is no matter
    times = {row.key: row.self_device_time_total if kernels else row.self_cpu_time_total for row in kernels or rows}
    largest = sorted(times, key=times.get, reverse=True)[:10]
    print("Of its time: " + ", ".join(f"{name} {100 * times[name] / sum(times.values()):.0f} %" for name in largest),
          flush=True)


def growth(args, device):
    """How the cost grows with the replay's size."""
    print("| frames in the replay | sample 32, ms | replay of 50 patches, GB | of DE-Rainbow, GB |\n|---|---|---|---|")
    for capacity in (25_000, 100_000, 400_000):
        generator, gigabytes = torch.Generator(device).manual_seed(1), []
        for shape, dtype in (((50, 64), torch.float16), ((84, 84), torch.uint8)):
            replay = spirl.Replay(capacity, shape, dtype, device)
            gigabytes.append(sum(t.nbytes for t in vars(replay).values() if torch.is_tensor(t)) / 1e9)
        replay.priorities.uniform_(0.01, 1)
        sample = milliseconds(lambda: replay.sample(32, 0.5, generator), device)  # noqa: B023
        print(f"| {capacity:,} | {sample:.2f} | {gigabytes[0]:.2f} | {gigabytes[1]:.2f} |")


def threads(args, device):
    """Two runs of one thread each at once, against one run of two threads."""
    flags = ["--mae-checkpoint", weights("Frostbite")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alone = rate(finish_run(start_run(folder, args, "spirl_rainbow.py", *flags, threads=2)))
        pair = [start_run(folder, args, "spirl_rainbow.py", *flags, "--seed", seed, threads=1) for seed in (1, 2)]
        both = [rate(finish_run(run)) for run in pair]
    print("| SPIRL on Frostbite | steps a second |\n|---|---|")
    print(f"| one run, two threads | {alone:.1f} |")
    print(f"| two runs at once, one thread each | {both[0]:.1f} + {both[1]:.1f} |", flush=True)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__.split("\n\n")[0])
    device = spirl.pick_device(args.device)
    torch.set_num_threads(args.threads)
    spirl.keep_freed_memory()
    print(f"torch {torch.__version__}, device {device}, {args.threads} threads, float32 matrix products at "
          f"{matrix_rate(device):.0f} GFLOP/s")
    for section in args.only:
        print(f"\n## {section}\n", flush=True)
        globals()[section.replace("-", "_")](args, device)
