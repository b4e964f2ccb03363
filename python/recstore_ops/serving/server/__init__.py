"""A bundle over the network: the Open Inference Protocol, version 2, over HTTP and gRPC.

It needs aiohttp, grpcio and protobuf, `pip install 'recstore-ops[serve]'`; `recstore serve-model` is its command.
"""
