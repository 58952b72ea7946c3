"""The same experiment on real machines: a server and clients that keep their data, over Flower.

A message is a packet (`messages`) of facts as JSON and named tensors, without pickle. A transport takes packets from
the server to clients and back, over Flower (`flower_server`, `flower_client`). `client_session` is a client: its data,
private states and ledger stay in its folder (`client_state`). `remote_rounds` is the server's half of the rounds: a
`rounds.Simulation` whose clients are on other machines.
"""

import os

# Flower reads these when it is imported: no telemetry, no check for updates.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
