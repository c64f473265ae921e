"""Replays traffic against clusters that are not here, with the policies that run in the service."""

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
