"""Many machines as one server: registration, placement, deployment, drills."""
