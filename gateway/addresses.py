"""What an address to listen on means."""

import ipaddress

__all__ = ["is_loopback"]


def is_loopback(address: str) -> bool:
    """Only this host reaches it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
