"""What wraps another encoding: gates, reflections, selective angles and grids."""
