"""Actor-critic on a cart with a pole: observers on workers, actions chosen in one forward pass for all of them.

    phalanx run --nproc-per-node 2 examples/batched_actor_critic.py

Each observer has a cart of its own, and asks the agent (rank 0) what to do. `choose` is an `async_execution` function:
its caller gets an answer when a Future has one, and no thread of the agent waits meanwhile. The last observer that asks
sets the Futures of all, after one forward pass over a batch. After some moves the agent learns from what it has chosen.

Batches lie in the order of the observers, so a run has the same numbers however calls are timed, and on any number of
processes. With `--no-batching` each call is answered by a forward pass of its own.
"""

import argparse
import itertools
import math
import os
import threading
import time

import torch
from torch import nn
from torch.futures import Future

from phalanx import rpc

parser = argparse.ArgumentParser(description="Actor-critic with batched inference over remote calls.")
parser.add_argument("--updates", type=int, default=150, help="how often the agent learns")
parser.add_argument("--observers", type=int, default=16)
parser.add_argument("--no-batching", action="store_true", help="one forward pass for each call")
args = parser.parse_args()
MOVES, MOST_MOVES, DISCOUNT, SMOOTHING, PASSES, LR = (
    32,
    500,
    0.99,
    0.95,
    8,
    1e-2,
)  # moves: of each observer between two updates


class CartPole:
    """The cart that Barto, Sutton and Anderson balanced a pole on (1983), with the numbers that everybody uses."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self):
        self.state = (torch.rand(4, generator=self.generator) * 0.1 - 0.05).tolist()
        self.moves = 0

    def move(self, action):
        """Push to the left (0) or the right (1) for a fiftieth of a second; whether that was the last move."""
        x, speed, angle, turn = self.state
        force, cos, sin = (10.0 if action else -10.0), math.cos(angle), math.sin(angle)
        push = (force + 0.05 * turn * turn * sin) / 1.1
        turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
        moving = push - 0.05 * turning * cos / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning]
        self.moves += 1
        return abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12) or self.moves == MOST_MOVES


class Observer:
    """A cart on a worker. Whether the last move ended an episode goes to the agent with the next question."""

    def __init__(self, number, agent):
        self.number, self.agent, self.cart = number, agent, CartPole(number)

    def play(self):
        """Some moves; gives back what came of the last one, and how long the episodes were that ended."""
        lengths, over = [], False
        for _ in range(MOVES):
            over = self.cart.move(self.agent.rpc_sync().choose(self.number, self.cart.state, over))
            if over:
                lengths.append(self.cart.moves)
                self.cart.reset()
        return self.cart.state, over, lengths


class Agent:
    """The policy, and the memory of the last moves."""

    def __init__(self):
        torch.manual_seed(0)
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], lr=LR)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 1 / args.updates, args.updates)
        self.random = torch.Generator().manual_seed(1)
        self.lock = threading.Lock()
        self.asked, self.memory = {}, []
        self.calls = self.passes = 0

    @rpc.functions.async_execution
    def choose(self, number, state, over):
        """A Future of this observer's action, which is there when all have asked."""
        mine = Future()
        with self.lock:
            self.calls += 1
            self.asked[number] = (state, over, mine)
            if len(self.asked) < args.observers:
                return mine
            asked = [self.asked.pop(one) for one in range(args.observers)]
        states, overs, answers = zip(*asked, strict=True)
        for answer, action in zip(answers, self.choose_all(torch.tensor(states), torch.tensor(overs)), strict=True):
            answer.set_result(action)
        return mine

    @torch.no_grad()
    def choose_all(self, states, overs):
        """An action for each state."""
        parts = states.split(1) if args.no_batching else [states]
        self.passes += len(parts)
        chances = torch.cat([self.actor(one) for one in parts]).softmax(1)
        actions = chances.multinomial(1, generator=self.random)
        self.memory.append((states, actions, overs))
        return actions.flatten().tolist()

    def learn(self, states, overs):
        """Clipped actor-critic with generalised advantages (Schulman and others, 2016, 2017); `states` came last."""
        chosen, actions, before = (torch.stack(one) for one in zip(*self.memory, strict=True))
        self.memory.clear()
        goes_on = 1.0 - torch.cat([before[1:], overs[None]]).float()
        with torch.no_grad():
            values = self.critic(torch.cat([chosen, states[None]])).squeeze(2)
            likely = self.actor(chosen).log_softmax(2).gather(2, actions)
        errors = 1 - DISCOUNT + DISCOUNT * goes_on * values[1:] - values[:-1]  # so values are from 0 to 1
        advantages = torch.zeros_like(errors)
        last = torch.zeros(args.observers)
        for move in reversed(range(len(errors))):
            last = advantages[move] = errors[move] + DISCOUNT * SMOOTHING * goes_on[move] * last
        returns = (advantages + values[:-1])[..., None]
        advantages = ((advantages - advantages.mean()) / (advantages.std() + 1e-8))[..., None]
        for _ in range(PASSES):
            ratio = (self.actor(chosen).log_softmax(2).gather(2, actions) - likely).exp()
            better = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            loss = nn.functional.mse_loss(self.critic(chosen), returns) - better
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.schedule.step()


def train(num_workers):
    """Rank 0: let all observers play, learn, and so on."""
    agent = Agent()
    reference = rpc.RRef(agent)
    workers = [f"observers{1 + number % num_workers}" for number in range(args.observers)]
    observers = [rpc.remote(to, Observer, (number, reference)) for number, to in enumerate(workers)]
    recent, begin = [], time.perf_counter()
    for update in range(1, args.updates + 1):
        played = [one.rpc_async().play() for one in observers]
        states, overs, lengths = zip(*torch.futures.wait_all(played), strict=True)
        agent.learn(torch.tensor(states), torch.tensor(overs))
        recent = [*recent, *itertools.chain(*lengths)][-50:]
        if update % 25 == 0:
            print(f"update {update}: {sum(recent) / len(recent):.1f} moves, the mean of 50 episodes", flush=True)
    took = time.perf_counter() - begin
    print(f"the last {len(recent)} episodes: {sum(recent) / len(recent):.2f} moves of at most {MOST_MOVES}")
    print(f"{agent.calls:,} calls answered by {agent.passes:,} forward passes, {agent.calls / took:,.0f} calls/s")


torch.set_num_threads(1)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
options = rpc.RpcBackendOptions(num_worker_threads=max(16, args.observers))  # a thread for each that plays
rpc.init_rpc("agent" if rank == 0 else f"observers{rank}", rpc_backend_options=options)
if rank == 0:
    train(world_size - 1)
rpc.shutdown()
