#!/usr/bin/env bash
# Makes what compose.yaml mounts, in deploy/compose/state (or in the folder that is named): a CA, a certificate for each
# process, the broker's files, and the configurations. It can be run again: configurations and the broker's own files
# stay as they were edited, and each process gets the certificate that is in STATE/pki now, for example a renewed one.
#
#   deploy/compose/prepare.sh [STATE]
#
# TIDEGATE: the command, by default `tidegate`. As root it gives each process its own files; otherwise set the owners that
# it prints at the end. The CA's key stays in STATE/pki, which no container sees but its ca.crt.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
state=${1:-$here/state}
tidegate=${TIDEGATE:-tidegate}
mkdir -p "$state" && cd "$state"
# The names of the services are no names of the private kind that a CA may sign by default.
[ -e pki/ca.key ] || $tidegate pki init --dir pki --permit gateway --permit pool --permit edge-1 --permit edge-2 --permit broker

issue() { # ROLE/NAME FOLDER HOST...
  local who=$1 folder=$2 hosts=() host
  shift 2
  for host in "$@" localhost 127.0.0.1; do hosts+=(--host "$host"); done
  [ -e "pki/$who.crt" ] || $tidegate pki issue "$who" --dir pki "${hosts[@]}"
  mkdir -p "$folder/pki"
  cp "pki/$who.crt" "$folder/pki/tls.crt" && cp "pki/$who.key" "$folder/pki/tls.key" && cp pki/ca.crt "$folder/pki/ca.crt"
}
issue gateway/main gateway gateway
issue pool/main pool pool
issue edge/edge-1 edge-1 edge-1
issue edge/edge-2 edge-2 edge-2
[ -e pki/broker/main.crt ] || $tidegate pki issue broker/main --dir pki --host broker --host localhost --host 127.0.0.1
[ -e broker/mosquitto.conf ] || $tidegate broker config --for mosquitto --dir broker --installed-at /etc/mosquitto/tidegate \
  --gateway main --pki pki --host broker --owner "$(id -un)" >/dev/null
# The generator has copied them only once; the broker would go on with a certificate that has ended.
cp pki/broker/main.crt broker/broker.crt && cp pki/broker/main.key broker/broker.key && cp pki/ca.crt broker/ca.crt
# The container runs as another user already.
sed -i '/^user /d' broker/mosquitto.conf

# Only where there is none: without the section `auth` that somebody has added, the site would be open again.
[ -e gateway/site.yaml ] || cp "$here/config/site.yaml" gateway/
[ -e pool/cloud.yaml ] || cp "$here/config/cloud.yaml" pool/
for device in edge-1 edge-2; do
  [ -e "$device/device.yaml" ] || sed "s/DEVICE/$device/g" "$here/config/device.yaml" >"$device/device.yaml"
done
if [ "$(id -u)" = 0 ]; then
  chown -R 65532:65532 gateway pool edge-1 edge-2 && chown -R 1883:1883 broker
else
  echo "give them to the containers' users: sudo chown -R 65532:65532 gateway pool edge-1 edge-2; sudo chown -R 1883:1883 broker"
fi
echo "made $state"
