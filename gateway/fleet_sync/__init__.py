"""Room gateway/fleet_sync."""
