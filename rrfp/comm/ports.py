"""A TCP port for a server that is started later."""

import socket


def reserve_port() -> int:
    """A TCP port of this host that nobody else is given until this process ends; a server may bind it by its number.

    Asking for a free port, letting go of it, and binding it later is a race: in between, the system may give it to anyone. Here it
    stays bound, without listening. To the system it is then taken, whoever asks for any port or connects; a socket that asks for
    this number, and sets SO_REUSEADDR as servers do (torch's TCPStore among them), binds it all the same. Forked children hold it too.

    Raises:
        OSError: no port is free.
    """
    # Both families at once where there are two: a server may bind either.
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("", 0))
        # Only now: had it been set before, the system might have picked a port that another socket holds in the same way.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        holder.close()
        raise
    port = holder.getsockname()[1]
    holder.detach()  # the descriptor stays open as long as the process
    return port
