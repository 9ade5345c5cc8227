"""What a flight needs of its gateway; core.Gateway is it."""

from __future__ import annotations

from typing import Protocol

from rungway.gateway.prompts import Lexer
from rungway.messages import Message, Start


class Port(Protocol):
    """`tell` and `start_work` are False when the message could not be sent or kept."""

    def tell(self, message: Message) -> bool: ...

    def start_work(self, replica_id: str, start: Start) -> bool: ...

    def cancel_work(self, replica_id: str, request_id: str) -> None: ...

    def lexer(self, tier: str, version: str) -> Lexer | None: ...
