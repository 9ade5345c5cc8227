"""Multiplexed channels between gateway, controller and replica. This package alone touches zmq."""

from rungway.channel.client import Client
from rungway.channel.curve import CurveKeys
from rungway.channel.server import Server

__all__ = ["Client", "CurveKeys", "Server"]
