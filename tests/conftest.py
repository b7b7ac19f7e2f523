from hypothesis import HealthCheck, settings

# No verdict may hang on how busy the machine is.
settings.register_profile("rmetric", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rmetric")
