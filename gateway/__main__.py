"""`python -m gateway`."""

from gateway.main import run_gateway

run_gateway()
