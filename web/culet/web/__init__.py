"""The gateway."""

import gc as _gc

# Nothing of what is imported is garbage, and looking for it takes a tenth of a start.
_collects = _gc.isenabled()
_gc.disable()
try:
    from culet.kernel.core.path import ParsedPath as ParsedPath
    from culet.kernel.core.path import build_agent_path as build_agent_path
    from culet.kernel.core.path import build_agent_url as build_agent_url
    from culet.kernel.core.path import kebab as kebab
    from culet.kernel.core.path import parse_agent_path as parse_agent_path

    from .app import create_app as create_app
    from .app import install as install
    from .app import kernel_of as kernel_of
    from .client import RemoteAgent as RemoteAgent
    from .client import connect as connect
    from .client_http import HttpAnswer as HttpAnswer
    from .client_http import ask_over_http as ask_over_http
    from .routing import route_sub_agent_request as route_sub_agent_request
    from .routing import route_sub_agent_socket as route_sub_agent_socket
    from .serve import serve as serve
finally:
    if _collects:
        _gc.enable()
