# A service on a CPU. Data in /data; the first start prints the operator's key (docker logs).
#
#   docker build -t marlaas .
#   docker run -p 127.0.0.1:8642:8642 -v marlaas:/data marlaas
#
# Sandboxes need user namespaces, which Docker's default seccomp profile refuses:
# add --security-opt seccomp=unconfined --security-opt apparmor=unconfined (compose.yaml does).

FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE

# The build of torch without CUDA is a tenth of the size.
ARG PIP_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /opt/marlaas
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY marlaas marlaas
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url $PIP_INDEX '.[postgres]'

RUN useradd --create-home --uid 10001 marlaas && mkdir /data && chown marlaas /data
USER marlaas
VOLUME /data
EXPOSE 8642

ENV MARLAAS_HOST=0.0.0.0 MARLAAS_PORT=8642 MARLAAS_FOLDER=/data MARLAAS_CACHE=/data/cache

# Longer than `drain_s`: running steps commit before the process is killed.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8642/readyz')"]

ENTRYPOINT ["marlaas"]
CMD ["serve"]
