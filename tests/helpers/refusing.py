"""Servers that almost are NATS servers, or let nobody in."""

import asyncio
import contextlib
import json

from helpers.ports import free_port

INFO = {"server_id": "x", "version": "2.11.0", "max_payload": 2**20, "auth_required": True, "nonce": "n"}
REFUSED, WELCOME = b"-ERR 'Authorization Violation'\r\n", b"PONG\r\n"


@contextlib.asynccontextmanager
async def serving(*answers, greetings=(INFO,)):
    """Serve as NATS does, or nearly: greet each one who connects and answer by the next of these, or by the last."""
    answering, greeting = list(answers), list(greetings)

    def following(left):
        return left.pop(0) if len(left) > 1 else left[0]

    async def serve(reader, writer):
        with contextlib.suppress(OSError):
            first = following(greeting)
            writer.write(first if isinstance(first, bytes) else f"INFO {json.dumps(first)}\r\n".encode())
            answer = b"no TLS"
            while said := await reader.read(65536):
                if b"CONNECT" in said:
                    answer = following(answering)
                if b"PING" in said or b"CONNECT" not in said:
                    writer.write(answer)
        writer.close()

    port = free_port()
    async with await asyncio.start_server(serve, "127.0.0.1", port):
        yield f"nats://127.0.0.1:{port}"
