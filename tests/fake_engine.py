"""A fake OpenAI-compatible engine: one process, asyncio, no packages. ``python fake_engine.py PORT [KEY=VALUE...]``.

It "prefills" one request at a time (``us`` microseconds a word), keeps a prefix cache of blocks of words per salt with counters
as vLLM names them, and answers gated decisions from the prompt's text: the last update counts, then what stands in the record.
Faults are options. Everything it was asked is at ``/asked``.
"""

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

OPTIONS: dict[str, Any] = {
    "model": "fake", "us": 20.0, "block": 16, "caching": 1, "metrics": 1, "names": "vllm:prefix_cache_{}_total", "usage": 1,
    "salts": 1, "die_after": 0, "hang_after": 0, "hang_from": 0, "die_mid_stream": 0, "child": 0, "openai": 1, "exit": 0,
    "traceback": 0, "details": 0, "slow_start": 0.0, "stubborn": 0, "queue": 1,
}  # fmt: skip
FORMS = (
    re.compile(r"If the [\w ]+ is (\w+) then (\w+); if it is (\w+) then (\w+)\."),
    re.compile(r"When the [\w ]+ is (\w+), (\w+)\. When it is (\w+), (\w+)\."),
    re.compile(r"Choose (\w+) if the [\w ]+ is (\w+), and choose (\w+) if it is (\w+)\."),
)


def answer(text: str) -> str:
    """What the rule in a prompt says for the value that counts."""
    for at, form in enumerate(FORMS):
        found = form.search(text)
        if found:
            a, b, c, d = found.groups()
            rule = {a: b, c: d} if at < 2 else {b: a, d: c}
            label = re.search(r"the ([\w ]+) is", found[0])
            assert label is not None
            values = re.findall(rf"[Tt]he {label[1]} is (?:now )?(\w+)\.\n", text.replace(found[0], ""))
            written = re.findall(rf"- {label[1].capitalize()}: (\w+)", text)
            value = values[-1] if values else written[-1] if written else ""
            return rule.get(value, "unknown")
    return "unknown"


class Engine:
    """State of the engine."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.o = options
        self.cache: set[bytes] = set()
        self.queries = self.hits = self.queued = 0
        self.asked: list[dict[str, Any]] = []
        self.lock = asyncio.Lock()

    def reuse(self, salt: str, words: list[str]) -> int:
        """Words that come from the cache; whole blocks, never all."""
        if not self.o["caching"]:
            return 0
        size, key, reused, broken = (
            int(self.o["block"]),
            hashlib.sha256((salt if self.o["salts"] else "").encode()),
            0,
            False,
        )
        for at in range(0, len(words) - size, size):
            key.update("\0".join(words[at : at + size]).encode())
            known = key.digest() in self.cache
            broken = broken or not known
            reused += 0 if broken else size
            self.cache.add(key.digest())
        return reused

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path = head.split(" ")[:2]
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = json.loads(await reader.readexactly(int(length[1]))) if length else {}
            await self.route(method, path, body, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def route(self, method: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        if not self.o["openai"]:
            return self.reply(writer, "<html>hello</html>", kind="text/html")
        if path == "/v1/models":
            return self.reply(writer, json.dumps({"object": "list", "data": [{"id": self.o["model"]}]}))
        if path == "/metrics":
            return self.metrics(writer)
        if path == "/version":
            return self.reply(writer, json.dumps({"version": "fake-1"}))
        if path == "/asked":
            return self.reply(writer, json.dumps({"asked": self.asked, "hash_seed": os.environ.get("PYTHONHASHSEED")}))
        if path in ("/v1/chat/completions", "/v1/completions"):
            return await self.generate(path, body, writer)
        return self.reply(writer, json.dumps({"detail": "Not Found"}), status=404)

    def reply(self, writer: asyncio.StreamWriter, text: str, status: int = 200, kind: str = "application/json") -> None:
        """A whole response."""
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(text.encode())}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n{text}".encode())

    def metrics(self, writer: asyncio.StreamWriter) -> None:
        """Counters."""
        if not self.o["metrics"]:
            return self.reply(writer, json.dumps({"detail": "Not Found"}), status=404)
        names = str(self.o["names"])
        lines = [
            f'{names.format(n)}{{engine="0",model_name="m"}} {float(getattr(self, n))}' for n in ("queries", "hits")
        ]
        if self.o["queue"]:
            lines.append(f'vllm:request_queue_time_seconds_sum{{engine="0"}} {0.001 * self.queued}')
            lines.append(f'vllm:request_queue_time_seconds_count{{engine="0"}} {float(self.queued)}')
        on = "True" if self.o["caching"] == 1 else "False"
        if self.o["caching"] == 2:  # off, although it says that it is on
            on, self.o["caching"] = "True", 0
        lines.append(
            f'vllm:cache_config_info{{block_size="{self.o["block"]}",cache_dtype="auto",enable_prefix_caching="{on}",'
            f'num_gpu_blocks="100"}} 1.0'
        )
        return self.reply(writer, "# HELP x y\n" + "\n".join(lines) + "\n", kind="text/plain")

    async def generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Stream an answer."""
        self.asked.append(body)
        n = len(self.asked)
        if body["model"] != self.o["model"]:
            error = {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
            return self.reply(writer, json.dumps(error), status=404)
        if body.get("cache_salt") == "":
            return self.reply(writer, json.dumps({"error": {"message": "cache_salt must not be empty"}}), status=400)
        if self.o["die_after"] and n > self.o["die_after"]:
            os._exit(1)
        if (self.o["hang_after"] and n == self.o["hang_after"]) or (self.o["hang_from"] and n >= self.o["hang_from"]):
            await asyncio.sleep(3600)
        chat = path.endswith("/chat/completions")
        text = "\n".join(m["content"] for m in body["messages"]) if chat else body["prompt"]
        words = text.split()
        async with self.lock:
            reused = self.reuse(body.get("cache_salt") or "", words)
            await asyncio.sleep(1e-6 * float(self.o["us"]) * (len(words) - reused))
        self.queries, self.hits, self.queued = self.queries + len(words), self.hits + reused, self.queued + 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        pieces = [answer(text), "."][: int(body["max_tokens"])]
        if chat:
            self.event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for at, piece in enumerate(pieces):
            if self.o["die_mid_stream"] and n == self.o["die_mid_stream"]:
                await writer.drain()
                writer.close()
                return
            if at:
                await asyncio.sleep(0.002)
            self.event(writer, {"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]})
            await writer.drain()
        self.event(writer, {"choices": [{"delta": {}, "text": "", "finish_reason": "stop"}]})
        if self.o["usage"]:
            usage: dict[str, Any] = {"prompt_tokens": len(words), "completion_tokens": len(pieces)}
            if self.o["details"]:
                usage["prompt_tokens_details"] = {"cached_tokens": reused}
            self.event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")

    def event(self, writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
        """One server-sent event."""
        writer.write(f"data: {json.dumps(data)}\n\n".encode())


async def main(port: int, options: dict[str, Any]) -> None:
    """Serve until told otherwise."""
    if options["exit"]:
        print("RuntimeError: no memory for a single block")
        sys.exit(1)
    if options["child"]:  # one that leaves the group, as a worker of an engine may
        code = "import time; time.sleep(600)"
        print("child", subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid, flush=True)
        print("child", subprocess.Popen([sys.executable, "-c", code]).pid, flush=True)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if options["stubborn"] else stop.set)
    await asyncio.sleep(options["slow_start"])
    server = await asyncio.start_server(Engine(options).handle, "127.0.0.1", port)
    print("ready", flush=True)
    async with server:
        await stop.wait()
    if options["traceback"]:
        raise RuntimeError("a traceback while shutting down")


if __name__ == "__main__":
    given = dict(OPTIONS)
    for item in sys.argv[2:]:
        key, _, value = item.partition("=")
        given[key] = type(OPTIONS[key])(value) if not isinstance(OPTIONS[key], int) else int(value)
    asyncio.run(main(int(sys.argv[1]), given))
