"""How the platform is started: Ray, the Serve application, its processes and their end."""
