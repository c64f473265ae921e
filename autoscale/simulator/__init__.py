"""Replays traffic against clusters that are not here, with the policies that run in the service.

The depth of every request in every round is what `autoscale.lane_policy.LanePolicy` says, with the table that
`autoscale.controller_policy.ControllerPolicy` makes of the lanes' reports; nothing of them is copied here. An event is a round
of a lane. What a round does follows `engine.drafting`: prepared drafts, asking for missed ones, patience, catching up.

What is approximated:

* Step times come from the caller's devices, to the token and the context; acceptance is the same at every position and for
  every request, and so is the chance that a guess is right.
* The drafts are shared evenly, and the lanes that share one ask alike: its rows are one lane's times ``lanes / drafts``.
* A request reserves KV cache for its whole length, so nobody is preempted; there is no prefix cache.
* Profiles are measured once. The service measures its models again while they are idle.
* With a stride, for large clusters: a lane asks its policy once per stride and repeats what it was told, in equal rounds of
  which the policy hears the first; the controller hears of lanes less often, and less often too with more than 16 lanes.
"""

from autoscale.simulator.cluster import ADAPTIVE, ARMS, FIXED, PLAIN, SEQUENTIAL, Arm, Cluster, Replicas, Run, simulate
from autoscale.simulator.lane import Device, Job, Lane, Pair
from autoscale.simulator.traffic import Arrival, Lengths, Traffic, Users, parse_traffic, read_trace

__all__ = [
    "ADAPTIVE",
    "ARMS",
    "FIXED",
    "PLAIN",
    "SEQUENTIAL",
    "Arm",
    "Arrival",
    "Cluster",
    "Device",
    "Job",
    "Lane",
    "Lengths",
    "Pair",
    "Replicas",
    "Run",
    "Traffic",
    "Users",
    "parse_traffic",
    "read_trace",
    "simulate",
]
