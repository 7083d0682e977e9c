"""The two scripts that train an agent, as a user runs them, on tiny budgets of real games."""

import json
import platform
import subprocess
import sys
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from conftest import LOADED, PLAY, ROOT, SMALL, files, finished, in_background, run_here, scalars
from PIL import Image

import spirl_baselines
import spirl_rainbow as spirl

VIDEO = "videos/policy.gif"
WITH_A_MAE = {"mae.pt", "figures/policy_attention.png"}


@in_background
def runs(folder):
    """Frostbite as in the 100K setting, and DE-Rainbow-P on MsPacman as in the 400K one, all in small: {method: the
    run's folder and results}."""
    in_400k = "--env-id ALE/MsPacman-v5 --train-frequency 4 --eval-frequency 135".split()
    flags = {
        "spirl": [*SMALL, "--capture-video"],
        "mae-all": [*SMALL, "--capture-video", "--method", "mae-all"],
        "de-rainbow": [*PLAY, "--capture-video"],
        "de-rainbow-p": [*PLAY, *in_400k, "--method", "de-rainbow-p", "--mae-frames", "150"],
    }
    script = dict.fromkeys(flags, "spirl_baselines.py") | {"spirl": "spirl_rainbow.py"}
    steps = "--total-timesteps", "240"
    return {method: finished(folder, method, *flags[method], *steps, script=script[method]) for method in flags}


@pytest.mark.parametrize(
    "method, steps, updates, evaluated, left",
    [
        ("spirl", 240, 120, [240], WITH_A_MAE | {VIDEO}),
        ("mae-all", 240, 120, [240], WITH_A_MAE | {VIDEO}),
        ("de-rainbow", 240, 120, [240], {VIDEO}),
        ("de-rainbow-p", 270, 30, [135, 270], set()),  # 30 more random steps
    ],
)
def test_a_run_leaves_what_the_readme_says(runs, method, steps, updates, evaluated, left):
    path, results = runs[method]
    assert files(path) == {"args.json", "agent.pt", "results.json"} | left
    assert VIDEO not in left or (path / VIDEO).read_bytes()[:6] == b"GIF89a"
    assert (results["method"], results["steps"], results["updates"], results["seed"]) == (method, steps, updates, 1)
    assert results["env_id"] == ("ALE/MsPacman-v5" if method == "de-rainbow-p" else "ALE/Frostbite-v5")
    scores = results["scores"]
    assert len(scores) == 3
    assert [evaluation["step"] for evaluation in results["evaluations"]] == evaluated
    statistics = (np.mean(scores), np.median(scores), np.std(scores, ddof=1))
    assert (results["mean"], results["median"], results["std"]) == pytest.approx(statistics)
    agent = torch.load(path / "agent.pt", weights_only=True)
    assert ("trunk.conv1.weight" in agent["model"]) == ("mae.pt" not in left)

    curves = scalars(path)
    expected = {"charts/episodic_return", "charts/SPS", "eval/mean", "eval/median"}
    expected |= {"charts/K"} if method == "spirl" else set()
    expected |= {"losses/loss", "losses/grad_norm", "losses/q_values"} if updates >= 100 else set()
    assert curves.keys() == expected
    assert [step for step, _ in curves["charts/SPS"]] == [99, 199]
    assert curves["charts/episodic_return"] == [tuple(pair) for pair in results["training_scores"]]
    for tag, average in (("eval/mean", np.mean), ("eval/median", np.median)):
        assert curves[tag] == [(e["step"], pytest.approx(average(e["scores"]))) for e in results["evaluations"]]
    assert results["versions"].keys() == {"torch", "gymnasium", "ale-py", "numpy"}
    if "mae.pt" in left:
        mae = torch.load(path / "mae.pt", weights_only=True)
        assert mae["sizes"]["image_size"] == 48 and mae["env_id"] == "ALE/Frostbite-v5"
        assert len(scalars(path / "mae")["mae/loss"]) == 2
    assert results.get("max_patches") == (12 if method == "spirl" else None)  # int(36 * 35 %)


def test_the_figure_and_the_video_show_what_is_selected_and_attended(tmp_path, monkeypatch):
    marked = [(np.full((16, 16, 3), 40 * n, np.uint8), [0, n], [n]) for n in (1, 2, 3)]
    spirl.save_video(marked, 2, tmp_path / "game.gif")
    with Image.open(tmp_path / "game.gif") as video:
        for n, step in enumerate(marked):
            video.seek(n)
            assert np.allclose(video.convert("RGB"), spirl.mark_patches(*step, 2), atol=3)
    drawn = []
    monkeypatch.setattr(spirl, "mark_patches", lambda frame, *what: drawn.append(what) or frame)
    spirl.draw_policy_attention(marked, 2, tmp_path / "figure.png")
    assert drawn == [([0, n], [n], 2) for n in (1, 1, 1, 1, 2, 2, 2, 3)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs Linux's C library")
def test_freed_memory_is_kept():
    code = """
import torch, spirl_rainbow
resident = lambda: int(open("/proc/self/statm").read().split()[1])  # pages
spirl_rainbow.keep_freed_memory()
pieces = [torch.ones(31 * 2**18) for _ in range(10)]  # of 31 MB
full = resident()
del pieces
assert resident() > 0.99 * full
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_mae_all_sees_by_the_mae_that_it_is_given(tmp_path, runs, monkeypatch):
    given = runs["spirl"][0] / "mae.pt"
    flags = [*LOADED, "--method", "mae-all", "--mae-checkpoint", given, "--total-timesteps", 130, "--eval-episodes", 1]
    end = run_here(tmp_path, monkeypatch, *flags, "--run-name", "given", script="spirl_baselines.py")
    weights, replay = torch.load(given, weights_only=True)["model"], end["replay"]
    assert all(torch.equal(value, weights[name]) for name, value in end["mae"].state_dict().items())
    embeddings, _ = spirl_baselines.embed_all_patches(end["mae"], end["observation"][:, 0])
    assert torch.equal(replay.frames[replay.slot], embeddings[0])


def test_a_trained_agent_is_watched_and_nothing_is_learned(tmp_path, runs, monkeypatch):
    path, results = runs["spirl"]
    flags = [*LOADED, "--mae-checkpoint", path / "mae.pt", "--agent-checkpoint", path / "agent.pt", "--capture-video"]
    flags += ["--eval-frequency", 50]  # which is of training: there is one evaluation
    end = run_here(tmp_path, monkeypatch, *flags, "--run-name", "watched")
    watched = tmp_path / "runs/watched"
    again = json.loads((watched / "results.json").read_text())
    assert again["scores"] == results["scores"] and again["steps"] == 240 and again["updates"] == 0
    assert len(again["evaluations"]) == 1 and end["max_patches"] == results["max_patches"]
    assert again["protocol"].startswith("mean score of a trained agent, after step 240: ")
    agent, copy = (torch.load(folder / "agent.pt", weights_only=True) for folder in (path, watched))
    assert all(torch.equal(value, agent["model"][name]) for name, value in end["online"].state_dict().items())
    assert copy["args"] == agent["args"] and files(watched) == files(path)  # how it was trained, not how it is watched


def oracle_run(args, mae, max_patches):
    """A whole run in its order, without checkpoints, logs and pictures: act, step, store, learn, copy. Returns what it
    ends with, the (step, raw score) of each game, and its evaluations, each with the weights of then.

    A life loss ends the return and starts a stack, but the game goes on, until it says that it is over or its frames
    are counted out; a cut-off game's last frame has a slot without an action, but where a life is lost just there; the
    step of the automatic reset is neither played nor counted; rewards are clipped. Evaluations have a network and a
    cache of errors of their own: they change nothing in training.
    """
    envs = spirl.make_envs(args, 1)
    num_actions = envs.single_action_space.n
    torch.manual_seed(args.seed)
    width = args.agent_dim
    trunk = spirl.SalientPatchTransformer(args.encoder_dim, width, args.agent_heads, args.padding, args.pooling)
    head = args.hidden_size, args.noisy_std, (args.v_min, args.v_max, args.num_atoms)
    online = spirl.RainbowNetwork(trunk, args.frame_stack * width, num_actions, *head)
    target = deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    returns = args.frame_stack, args.n_step, args.gamma, args.priority_exponent
    replay = spirl.Replay(args.buffer_size, (max_patches, args.encoder_dim), torch.float16, "cpu", *returns)
    random_actions = np.random.default_rng([args.seed, spirl.ACT]).integers(num_actions, size=args.learning_starts)
    generator = torch.Generator().manual_seed(spirl.game_seeds(args.seed, spirl.LEARN).item())
    online.resample_noise(generator)
    errors = spirl.ErrorMapCache(mae)

    def see(errors, frames):
        frames = torch.from_numpy(frames)
        patch_ids, count = spirl.select_salient_patches(errors(frames), max_patches, args.lorenz_slope)
        return spirl.encode_patches(mae, frames, patch_ids, count).half(), count

    def store(starts):
        replay.append(*see(errors, observation[0]), starts)

    updates, scores, evaluations, score, length = 0, [], [], 0.0, 0
    observation, info = envs.reset(seed=spirl.game_seeds(args.seed, spirl.PLAY, 0))
    store(starts=True)
    for step in range(args.total_timesteps):
        if step < args.learning_starts:
            action = random_actions[step]
        else:  # the best action under the noise that the last update drew
            with torch.no_grad():
                action = online.q_values(*replay.stacks(torch.tensor([replay.slot]))).argmax().item()
        lives = info["lives"][0]
        observation, reward, terminated, _, info = envs.step(np.array([action]))
        score, length = score + float(reward[0]), length + 1
        life_lost = bool(terminated[0] or info["lives"][0] < lives)
        game_over = bool(terminated[0] or 4 * length >= args.max_episode_frames)
        replay.complete(action, min(float(reward[0]), 1.0), life_lost)
        if game_over and not life_lost:
            store(starts=False)
            replay.release_all()
        if game_over:
            scores.append((step, score))
            score, length = 0.0, 0
            observation, info = envs.reset(seed=spirl.game_seeds(args.seed, spirl.PLAY, len(scores)))
        store(starts=life_lost or game_over)
        if step >= args.learning_starts and step % args.train_frequency == 0:
            done = (step - args.learning_starts) / (args.total_timesteps - args.learning_starts)
            beta = args.priority_weight + (1 - args.priority_weight) * done
            spirl.learn(args, online, target, optimizer, replay, beta, generator)
            updates += 1
            if updates % args.target_update_frequency == 0:
                target.load_state_dict(online.state_dict())
        if (step + 1) % (args.eval_frequency or args.total_timesteps) == 0:
            cache = spirl.ErrorMapCache(mae)
            cache.errors.update(errors.errors)
            raw_scores, _ = spirl.evaluate(args, deepcopy(online), partial(see, cache))
            evaluations.append((step + 1, raw_scores, deepcopy(online.state_dict())))
    return {"online": online, "target": target, "replay": replay, "error_map": errors}, scores, evaluations


LEARNING = "--total-timesteps 200 --train-frequency 4 --eval-frequency 40 --target-update-frequency 7 "
LEARNING += "--max-episode-frames 240 --eval-episodes 2 --eval-epsilon 0.5 --learning-rate 0.01"
OTHER = " --encoder-dim 32 --encoder-heads 2 --agent-dim 24 --agent-heads 4 --frame-stack 3 --hidden-size 40 --n-step 7"
OTHER += " --num-atoms 21 --v-min=-4 --v-max 6 --noisy-std 0.3 --gamma 0.9 --priority-exponent 0.7 --priority-weight .2"


def playing(game, max_episode_frames, steps):
    """Random steps, and one that learns."""
    flags = f"--env-id ALE/{game}-v5 --max-episode-frames {max_episode_frames} --image-size 32 --max-ratio 0.4 "
    flags += f"--learning-starts {steps} --total-timesteps {steps + 1} --checkpoint-frequency 0 "
    return flags + "--buffer-size 800 --eval-episodes 1"


@pytest.mark.parametrize(
    "flags, lives_lost, cut_off",
    [
        (LEARNING + " --eval-episodes 5", 0, True),  # its best median is not where its best mean is
        (LEARNING + OTHER + " --lorenz-slope 1.05 --padding token --pooling mean --seed 2", 0, True),
        (playing("MsPacman", 3000, 700), 3, False),
        (playing("MsPacman", 900, 680), 3, True),
        (playing("MsPacman", 708, 300), 1, False),  # a life is lost in the very step that is cut off
        (playing("Frogger", 3000, 400), 3, False),  # plays on after its last life
    ],
)
def test_a_run_is_that_of_the_oracle_bit_for_bit(tmp_path, monkeypatch, flags, lives_lost, cut_off):
    end = run_here(tmp_path, monkeypatch, *SMALL, *flags.split(), "--run-name", "run")
    args = end["args"]
    assert end["max_patches"] == (6 if args.max_ratio else 12)  # int(16 * 40 %), int(36 * 35 %)
    expected, games, evaluations = oracle_run(args, end["mae"], end["max_patches"])
    for name in ("online", "target"):
        weights = end[name].state_dict()
        assert all(torch.equal(weights[key], value) for key, value in expected[name].state_dict().items()), name
    replay = end["replay"]
    for name, value in vars(expected["replay"]).items():
        kept = getattr(replay, name)
        assert torch.equal(kept, value) if torch.is_tensor(value) else kept == value, name
    assert end["error_map"].errors == expected["error_map"].errors  # nothing that evaluation saw
    assert end["run"].training_scores == games and len(games) >= 1
    if args.learning_rate == 0.01:
        assert scalars(tmp_path / "runs/run")["charts/K"][-1] == (199, replay.counts[replay.slot].item())
    # What this case is for has happened.
    slots = torch.arange(len(replay.actions)) != replay.slot
    assert ((replay.actions[slots] < 0) & (replay.life_ids[slots] >= 0)).any() == cut_off
    assert replay.ended.sum() >= lives_lost and (args.learning_rate == 0.01 or replay.rewards.max() == 1)

    # The report is about the weights that had the largest median, as they were then.
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    assert [(e["step"], e["scores"]) for e in results["evaluations"]] == [each[:2] for each in evaluations]
    medians, means = ([average(scores) for _, scores, _ in evaluations] for average in (np.median, np.mean))
    assert args.eval_episodes < 5 or np.argmax(medians) != np.argmax(means)
    step, scores, weights = evaluations[int(np.argmax(medians))]  # the first of equals
    agent = torch.load(tmp_path / "runs/run/agent.pt", weights_only=True)
    assert agent["step"] == step and all(torch.equal(agent["model"][name], weights[name]) for name in weights)
    assert results["scores"] == scores and results["median"] == max(medians)
    assert results["protocol"].startswith("best median" if args.eval_frequency else "mean score of the final weights")


def test_fixed_selection_on_a_game_without_an_adopted_ratio(tmp_path, monkeypatch):
    flags = "--env-id ALE/Skiing-v5 --total-timesteps 130 --selection fixed --lorenz-slope 1 --eval-episodes 1".split()
    end = run_here(tmp_path, monkeypatch, *SMALL, *flags, "--run-name", "run")
    counted = torch.load(tmp_path / "runs/run/mae.pt", weights_only=True)["salient_counts"]
    frames = spirl.collect_random_frames(end["args"], 64)
    assert counted["lorenz_slope"] == 1
    assert torch.equal(counted["counts"], spirl.count_salient_patches(end["mae"], frames, 1)["counts"])
    assert end["max_patches"] == spirl.ratio_to_patches(spirl.ideal_max_ratio(counted["counts"], 36), 36)
    assert set(end["replay"].counts[:130].tolist()) == {end["max_patches"]}
    assert end["preprocess"](end["observation"][:, 0])[0].dtype == torch.float16
    assert end["replay"].rewards.min() == -1
    assert end["run"].training_scores[0][1] < -500  # each step costs some 7 points

    again = [*LOADED, *flags, "--mae-checkpoint", "runs/run/mae.pt", "--run-name", "again"]
    assert run_here(tmp_path, monkeypatch, *again)["max_patches"] == end["max_patches"]


def test_a_run_stops_at_what_is_not_finite_and_keeps_the_checkpoint_before(tmp_path, runs, monkeypatch, capsys):
    mae = runs["spirl"][0] / "mae.pt"
    flags = [*LOADED, "--mae-checkpoint", mae, "--total-timesteps", 200, "--run-name", "diverged"]
    with pytest.raises(RuntimeError, match="non-finite"):
        run_here(tmp_path, monkeypatch, *flags, "--learning-rate", 2e9, "--checkpoint-frequency", 20)
    assert "runs/diverged; if stopped: --resume runs/diverged\n" in capsys.readouterr().out
    checkpoint = torch.load(tmp_path / "runs/diverged/checkpoint.pt", weights_only=True)
    assert checkpoint["run"]["saved_step"] == 120  # after the last random step
    assert all(value.isfinite().all() for value in checkpoint["online"].values())
