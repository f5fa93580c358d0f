"""`penstock serve --cluster ray`: gateways and engine grids as Ray actors in placement groups.

    driver (`penstock serve`)   follows the controller's events, asks it to stop
    controller (actor, head)    the ordinary supervisor, autoscaler and control socket; its processes are remote
    engine host (actor)         runs `penstock engine` as a child, in a bundle with the CPUs and GPUs of its ranks
    gateway host (actor)        runs `penstock gateway` and its encoders as children, one per node

Only `cluster.py` imports Ray, when it is used: `pip install "penstock[ray]"`.
"""
