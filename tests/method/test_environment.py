"""Each rule of the environment, seen on a real game that breaks it if it is wrong."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch

import spirl_rainbow as spirl


def make(game, num_envs=1, **changes):
    return spirl.make_envs(spirl.Args(env_id=f"ALE/{game}-v5", **changes), num_envs)


def changed(game, **changes):
    """`make_envs`'s environment but for some settings: what the rule would be violated by."""
    kwargs = dict(make(game).spec.kwargs)
    kwargs.pop("vectorization_mode", None)
    kwargs.pop("game", None)
    return gym.make_vec(f"ALE/{game}-v5", 1, "vector_entry_point", **{**kwargs, **changes})


def play(env, seed, actions):
    """The observations, raw rewards, ends and lives of a game from a seeded reset."""
    observation, info = env.reset(seed=np.array([seed]))
    steps = [(observation[0, 0], 0, False, False, info["lives"][0], info["episode_frame_number"][0])]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(np.array([action]))
        steps.append((observation[0, 0], reward[0], terminated[0], truncated[0], info["lives"][0],
                      info["episode_frame_number"][0]))
    return steps


def random_actions(num, actions=18, seed=0):
    return np.random.default_rng(seed).integers(actions, size=num)


def test_observations_are_96_pixel_colour_frames_unstacked():
    observation, _ = make("Frostbite", 3).reset(seed=np.arange(3))
    assert observation.shape == (3, 1, 96, 96, 3) and observation.dtype == np.uint8
    assert (observation[..., 0] != observation[..., 2]).any()  # in colour


def test_actions_never_stick():
    """Without sticky actions two games with as many no-ops at the start are the same, whatever their seeds."""
    env = make("MsPacman")
    first = {}
    for seed in range(100):
        _, info = env.reset(seed=np.array([seed]))
        pair = first.setdefault(int(info["frame_number"][0]), seed)
        if pair != seed:
            break
    actions = random_actions(150, 9)
    same = [(a[0] == b[0]).all() for a, b in zip(play(env, pair, actions), play(env, seed, actions))]
    assert all(same)
    sticky = changed("MsPacman", repeat_action_probability=0.25)
    assert not all((a[0] == b[0]).all() for a, b in zip(play(sticky, pair, actions), play(sticky, seed, actions)))


def test_the_score_stays_raw():
    rewards = [step[1] for step in play(make("MsPacman"), 3, random_actions(200, 9))]
    assert max(rewards) >= 10  # a pebble's ten points


def test_one_step_is_four_frames():
    frames = [step[5] for step in play(make("Seaquest"), 3, random_actions(50))]
    assert np.diff(frames).tolist() == [4] * 50


def test_the_last_two_frames_are_pooled():
    """Seaquest blinks: the maximum over two frames shows what every other frame hides."""
    actions = random_actions(100)
    pooled = np.stack([step[0] for step in play(make("Seaquest"), 3, actions)])
    single = np.stack([step[0] for step in play(changed("Seaquest", maxpool=False), 3, actions)])
    assert (pooled >= single).all() and (pooled > single).any()


def test_up_to_30_no_ops_start_a_game():
    env = make("Seaquest")
    starts = [int(env.reset(seed=np.array([seed]))[1]["frame_number"][0]) for seed in range(30)]
    assert len(set(starts)) > 12 and 25 < max(starts) <= 31
    env = changed("Seaquest", noop_max=0)
    assert len({int(env.reset(seed=np.array([seed]))[1]["frame_number"][0]) for seed in range(5)}) == 1


def test_the_actions_are_the_games_own():
    assert make("MsPacman").single_action_space.n == 9
    assert make("Frostbite").single_action_space.n == 18
    assert make("Breakout").single_action_space.n == 4


def test_a_game_that_waits_for_fire_is_started():
    """Breakout's ball is served by FIRE alone: without it every frame is the same."""
    for fire, moves in ((True, True), (False, False)):
        env = make("Breakout") if fire else changed("Breakout", use_fire_reset=False)
        steps = play(env, 3, [0] * 20)
        assert any((step[0] != steps[0][0]).any() for step in steps) == moves


@pytest.mark.parametrize("game", ["Frostbite", "Seaquest", "MsPacman", "BattleZone", "Frogger", "Turmoil"])
def test_a_life_loss_shows_in_the_lives_and_the_flags_are_of_games(game):
    """Frogger and Turmoil play on after a loss to none; ale-py's own flags of lost lives leave that one out."""
    env = make(game)
    steps = play(env, 3, random_actions(1200, int(env.single_action_space.n)))
    over = next(i for i, step in enumerate(steps) if step[2])
    game_lives = [step[4] for step in steps[: over + 1]]
    losses = [i for i in range(1, over + 1) if game_lives[i] < game_lives[i - 1]]
    assert len(losses) == game_lives[0] >= 3  # several lives were played, one after the other
    assert (losses[-1] < over) == (game in ("Frogger", "Turmoil")) and not any(step[3] for step in steps[: over + 1])
    flagged = [step[2] for step in play(changed(game, life_loss_info=True), 3, random_actions(
        1200, int(env.single_action_space.n)))]
    assert flagged[losses[-1]] == (losses[-1] == over) and all(flagged[loss] for loss in losses[:-1])
    assert np.diff([step[5] for step in steps[: over + 1]]).min() > 0  # and the game's clock goes on
    assert steps[over + 1][5] < steps[over][5] and steps[over + 1][1] == 0  # only now a new one, by a step of no reward


def test_a_cut_off_game_is_truncated_and_not_terminated():
    steps = play(make("BattleZone", max_episode_frames=400), 3, [0] * 101)
    end = [step[3] for step in steps].index(True)
    assert 400 <= steps[end][5] < 440 and steps[end - 1][5] < 400 + 36  # after 400 frames, the no-ops not counted
    assert not any(step[2] for step in steps[: end + 1]) and steps[end][4] == 5  # no life was lost
    assert spirl.Args().max_episode_frames == 108_000
    assert make("BattleZone").spec.kwargs["max_num_frames_per_episode"] == 108_000


def test_a_life_lost_in_the_step_that_is_cut_off_is_both():
    """Ms. Pac-Man loses a life at the first of these; the game is over there, however long its limit."""
    actions = random_actions(400, 9)
    lives = [step[4] for step in play(make("MsPacman"), 3, actions)]
    loss = next(i for i in range(1, 400) if lives[i] < lives[i - 1])
    for limit in (4 * loss - 3, 4 * loss):  # the step's first frame is its last one, or its fourth
        *_, terminated, truncated, left, _ = play(make("MsPacman", max_episode_frames=limit), 3, actions)[loss]
        assert truncated and not terminated and left in (lives[loss], lives[loss] + 1)


def test_seeds_decide_the_game_and_differ_by_purpose():
    env = make("Frostbite")
    actions = random_actions(120)
    assert all((a[0] == b[0]).all() for a, b in zip(play(env, 11, actions), play(env, 11, actions)))
    purposes = (spirl.COLLECT, spirl.PLAY, spirl.EVALUATE)
    drawn = np.concatenate([spirl.game_seeds(seed, purpose, num=50) for seed in range(1, 21) for purpose in purposes])
    assert drawn.dtype == np.int64 and drawn.min() >= 0 and drawn.max() < 2**31
    assert len(set(drawn.tolist())) == len(drawn) == 3000  # runs with adjacent seeds share no seed
    assert (spirl.game_seeds(1, spirl.PLAY, 0) != spirl.game_seeds(1, spirl.PLAY, 1)).all()


def test_collection_is_repeatable(random_play):
    frames = random_play["ALE/Frostbite-v5"]
    again = spirl.collect_random_frames(spirl.Args(seed=99), 400)
    assert (frames == again.numpy()).all()
    other = spirl.collect_random_frames(spirl.Args(seed=2), 400)
    assert (frames != other.numpy()).any()


@pytest.mark.parametrize("changes", [{}, {"max_episode_frames": 500}])
def test_collection_plays_first_lives_each_from_its_seed(changes):
    args = spirl.Args(seed=4, **changes)
    frames, rng = spirl.collect_random_frames(args, 700), np.random.default_rng([4, spirl.COLLECT])
    env, games = spirl.make_envs(args, 1), 0
    observation, _ = env.reset(seed=spirl.game_seeds(4, spirl.COLLECT, 0))
    for frame in frames:
        assert (frame.numpy() == observation[0, 0]).all()
        observation, _, terminated, truncated, info = env.step(rng.integers(18, size=1))
        if truncated[0] or info["lives"][0] < 4:  # as soon as one of the four lives is lost
            games += 1
            observation, _ = env.reset(seed=spirl.game_seeds(4, spirl.COLLECT, games))
    assert games >= 1


class FirstPixels(torch.nn.Module):
    """A fixed stand-in policy that needs no training: a linear map of a few pixels of the stack."""

    def __init__(self, actions):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(4 * 32, actions, generator=generator)

    def q_values(self, frames, counts):
        return (frames * counts[:, :, None]).flatten(1).float() @ self.weight


def read_pixels(frames):
    frames = torch.from_numpy(frames)[:, 1::12, 1::24, 0].reshape(len(frames), -1)
    return frames.half(), torch.ones(len(frames)).long()


def oracle_game(policy, seed, args):
    """One whole game, alone, step by step: its raw score and length. A lost life changes nothing in the stack."""
    env = spirl.make_envs(args, 1)
    observation, _ = env.reset(seed=np.array([seed]))
    stack, score, length = [torch.zeros(1, 32).half()] * 4, 0, 0
    counts = [0, 0, 0, 0]
    while True:
        stack, counts = stack[1:] + [read_pixels(observation[:, 0])[0]], counts[1:] + [1]
        q = policy.q_values(torch.stack(stack, 1), torch.tensor([counts]))
        observation, reward, terminated, *_ = env.step(q.argmax(1).numpy())
        score, length = score + int(reward[0]), length + 1
        if terminated[0] or 4 * length >= args.max_episode_frames:
            return score, length


def test_evaluation_plays_each_game_once_to_its_end_and_touches_nothing():
    args = spirl.Args(env_id="ALE/MsPacman-v5", seed=5, max_episode_frames=600, eval_episodes=4, eval_epsilon=0.0)
    policy = FirstPixels(9).train()
    seeds = spirl.game_seeds(5, spirl.EVALUATE, num=4)
    expected = [oracle_game(policy, seed, args) for seed in seeds]
    batches = []

    def preprocess(frames):
        assert not policy.training  # noise off
        batches.append(len(frames))
        return read_pixels(frames)

    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    scores, recording = spirl.evaluate(args, policy, preprocess)
    assert scores == [score for score, _ in expected] and len(set(scores)) > 1
    lengths = [length for _, length in expected]
    assert batches == [sum(length > t for length in lengths) for t in range(max(lengths))]  # only games that go on
    assert torch.equal(torch.get_rng_state(), torch_state) and (np.random.get_state()[1] == numpy_state).all()
    assert policy.training
    assert len(recording) == min(lengths[0], 1000)
    frame, (stack, counts) = recording[2]
    assert frame.shape == (96, 96, 3) and counts.tolist() == [[0, 1, 1, 1]]
    assert torch.equal(stack[0, 3], read_pixels(frame[None])[0][0])
    assert spirl.evaluate(dataclasses.replace(args, eval_epsilon=1.0), policy, read_pixels)[0] != scores


def test_a_game_is_scored_to_the_step_that_cuts_it_off_though_it_loses_a_life_there():
    env, rng = make("MsPacman"), np.random.default_rng([1, spirl.EVALUATE])
    _, info = env.reset(seed=spirl.game_seeds(1, spirl.EVALUATE))
    score, length, lives = 0, 0, info["lives"][0]
    while info["lives"][0] == lives:
        action = rng.integers(9, size=1)
        rng.random(1)  # evaluate draws whether the action is random
        _, reward, _, _, info = env.step(action)
        score, length = score + float(reward[0]), length + 1
    args = spirl.Args(env_id="ALE/MsPacman-v5", max_episode_frames=4 * length, eval_episodes=1, eval_epsilon=1.0)
    scores, recording = spirl.evaluate(args, FirstPixels(9), read_pixels)
    assert scores == [score] and len(recording) == length
