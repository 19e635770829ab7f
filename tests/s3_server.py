"""A server of the S3 protocol (moto's), and in front of it a wire that is cut as long as a file exists.

python tests/s3_server.py CUT      prints the address of the wire, and serves until its input ends
"""

import asyncio
import os
import sys
import threading

from moto.server import ThreadedMotoServer

CUT = sys.argv[1]
BUCKET = "runs"


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes, until one side ends or the wire is cut."""
    try:
        while data := await reader.read(1 << 16):
            if os.path.exists(CUT):
                break
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort() if os.path.exists(CUT) else writer.close()


async def main() -> None:
    """Serve until the input ends."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if os.path.exists(CUT):
            writer.transport.abort()
            return
        to, back = await asyncio.open_connection(host, port)
        await asyncio.gather(carry(reader, back), carry(to, writer))

    wire = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{wire.sockets[0].getsockname()[1]}", flush=True)
    ended = threading.Thread(target=sys.stdin.read, daemon=True)
    ended.start()
    while ended.is_alive():
        await asyncio.sleep(0.05)
    server.stop()


if __name__ == "__main__":
    asyncio.run(main())
