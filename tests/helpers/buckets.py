"""A real S3 server, in this process, and a bucket on it."""

import urllib.request
from contextlib import contextmanager

import boto3
import fsspec
from moto.server import ThreadedMotoServer

BUCKET = "checkpoints"


@contextmanager
def served():
    """Serve S3; yield the environment in which it is found."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)  # where a port is taken it would wait for ever
    server.start()
    _, port = server.get_host_and_port()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()


def refuse(environment, *, after):
    """Have the server refuse what comes after so many requests."""
    url = environment["AWS_ENDPOINT_URL"] + "/moto-api/reset-auth"
    plain = {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(url, str(after).encode(), plain, method="POST")).read()


def client():
    """Return a client of the server that the environment names, after forgetting those of others."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    return boto3.client("s3")
