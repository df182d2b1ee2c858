# The engine on a CPU: docker build -t sgl-prefill . && docker run -p 127.0.0.1:30000:30000 -v models:/models sgl-prefill
FROM python:3.11-slim
RUN apt-get update -q && apt-get install -yq --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home engine && mkdir /engine /models && chown engine /engine /models
COPY --chown=engine . /engine
USER engine
WORKDIR /engine
RUN scripts/install.sh
# Downloads, measurements of the machine and the demo model stay in the volume.
ENV XDG_CACHE_HOME=/models/cache HF_HOME=/models/huggingface
VOLUME /models
EXPOSE 30000
# A first start measures the machine.
HEALTHCHECK --start-period=10m CMD [".venv/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=5)"]
# Whoever reaches the port may ask: publish it to 127.0.0.1, or add --api-key.
ENTRYPOINT [".venv/bin/python", "-m", "sgl_prefill.launch_server", "--host", "0.0.0.0", "--port", "30000"]
