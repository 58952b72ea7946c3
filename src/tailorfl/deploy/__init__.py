"""The same experiment on real machines: a server and clients that keep their data, over Flower.

A message is a packet (`packet`): facts as JSON and named tensors, without pickle. A `post` takes packets from the
server to clients and back: over Flower (`flower`), or within a process. `member` is a client: its data, private states
and ledger stay in its folder (`slots`). `remote` is the server's half of the rounds: `rounds.Simulation`, whose clients
are elsewhere.
"""
