#!/usr/bin/env bash
# Installs the chart into a cluster that kind makes, asks the gateway there, and takes the cluster away again. For machines
# with docker, kind, helm and kubectl; no run of the tests calls it.
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in docker kind helm kubectl; do
  command -v $program >/dev/null || { echo "make e2e-kind needs $program" >&2; exit 1; }
done
cluster=tidegate-e2e
scratch=$(mktemp -d)
trap 'kind delete cluster --name $cluster; rm -rf "$scratch"' EXIT
ENGINE=docker BASE=${BASE:-docker.io/library/python:3.11-slim-bookworm}
export ENGINE BASE
for image in gateway pool-cpu; do deploy/containers/build.sh $image localhost/tidegate-$image:0.2.0; done
[ -d .tidegate/test-models/digits ] || .venv/bin/tidegate model build digits --repository .tidegate/test-models
cp -r .tidegate/test-models/. "$scratch" && chmod -R a+rX "$scratch"
cat >"$scratch/kind.yaml" <<KIND
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane, extraMounts: [{hostPath: $scratch, containerPath: /models}]}]
KIND
kind create cluster --name $cluster --config "$scratch/kind.yaml" --wait 120s
kind load docker-image --name $cluster localhost/tidegate-gateway:0.2.0 localhost/tidegate-pool-cpu:0.2.0
helm install tide deploy/helm/tidegate --namespace tidegate --create-namespace --wait --timeout 10m \
  --set models.volume.hostPath.path=/models --set fullnameOverride=tide \
  --set gateway.resources.requests.cpu=100m --set pool.resources.requests.cpu=100m
kubectl -n tidegate port-forward service/tide-gateway 18000:8000 >/dev/null &
forward=$!
trap 'kill $forward; kind delete cluster --name $cluster; rm -rf "$scratch"' EXIT
image=$(python3 -c 'print([0.5] * 64)')
curl --silent --show-error --fail --retry 20 --retry-connrefused --retry-delay 1 --include \
  -d "{\"inputs\": [{\"name\": \"image\", \"datatype\": \"FP32\", \"shape\": [1, 1, 8, 8], \"data\": $image}]}" \
  http://127.0.0.1:18000/v2/models/digits/infer | tee "$scratch/answer"
grep -qi '^tidegate-served-by: pool/tide-pool-0' "$scratch/answer" && echo "answered by the pool in the cluster"
# A pod that goes takes no request with it.
kubectl -n tidegate rollout restart deployment/tide-gateway && kubectl -n tidegate rollout status deployment/tide-gateway
