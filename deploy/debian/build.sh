#!/usr/bin/env bash
# Builds a Debian package of one process, for devices and servers without containers: an environment in /opt/tidegate with
# all libraries in it, the unit, its user, and the profile as a configuration file. Installing it needs no network.
#
#   deploy/debian/build.sh gateway|edge|pool-cpu [FOLDER]      makes FOLDER/tidegate-edge_0.2.0_amd64.deb, by default in dist
#
# Its wheels are those of the image (deploy/containers/wheels.sh), for this machine's Debian, Python and processor. Needs
# dpkg-deb and the interpreter that the device has (PYTHON, by default /usr/bin/python3).
set -euo pipefail
cd "$(dirname "$0")/../.."
image=${1:?usage: build.sh gateway|edge|pool-cpu [FOLDER]}
into=${2:-dist}
python=${PYTHON:-/usr/bin/python3}
case $image in
gateway) role=gateway profile=site ;;
edge) role=edge profile=device ;;
pool-cpu) role=pool profile=cloud ;;
*) echo "no package is made for $image: gateway, edge or pool-cpu" >&2; exit 2 ;;
esac
[ -d "dist/wheels/$image" ] || deploy/containers/wheels.sh "$image"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml | head -1)
minor=$("$python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree/opt" "$tree/etc/tidegate" "$tree/usr/lib/systemd/system" "$tree/usr/lib/sysusers.d" "$tree/DEBIAN"

"$python" deploy/containers/install.py "dist/wheels/$image" "$tree/opt/tidegate"
# Scripts name the interpreter by the place where they were made.
grep -rlI "^#!$tree" "$tree/opt/tidegate/bin" | xargs sed -i "1s|^#!$tree|#!|"
sed -i "s|$tree||g" "$tree/opt/tidegate/bin"/activate* "$tree/opt/tidegate/pyvenv.cfg"
install -m 0644 "deploy/config/$profile.yaml" "$tree/etc/tidegate/$profile.yaml"
install -m 0644 "deploy/systemd/tidegate-$role.service" "$tree/usr/lib/systemd/system/"
install -m 0644 deploy/systemd/tidegate.sysusers "$tree/usr/lib/sysusers.d/tidegate.conf"

cat >"$tree/DEBIAN/control" <<CONTROL
Package: tidegate-$role
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: Tidegate contributors <tidegate@localhost>
Section: net
Priority: optional
Depends: python3 (>= $minor), python3 (<< ${minor%.*}.$((${minor#*.} + 1))), libstdc++6, adduser
Conflicts: $(for other in gateway edge pool; do [ $other = $role ] || printf 'tidegate-%s, ' $other; done | sed 's/, $//')
Installed-Size: $(du -sk "$tree/opt" | cut -f1)
Description: $(sed -n 's/^Description=Tidegate \(.*\)/Tidegate \1/p' "deploy/systemd/tidegate-$role.service")
 Tidegate answers inference requests from the cheapest place that makes the
 deadline. This package holds every library in /opt/tidegate, and a unit that
 is started once /etc/tidegate/$profile.yaml is yours.
CONTROL
echo "/etc/tidegate/$profile.yaml" >"$tree/DEBIAN/conffiles"
cat >"$tree/DEBIAN/postinst" <<'POSTINST'
#!/bin/sh
set -e
if [ "$1" = configure ]; then
  getent passwd tidegate >/dev/null || adduser --system --group --quiet --home /var/lib/tidegate tidegate
  install -d -o tidegate -g tidegate /var/lib/tidegate
  # It is enabled by hand: before that its configuration and its certificate have to be there.
  if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
fi
POSTINST
cat >"$tree/DEBIAN/prerm" <<PRERM
#!/bin/sh
set -e
if [ "\$1" = remove ] && [ -d /run/systemd/system ]; then systemctl disable --now tidegate-$role.service || true; fi
PRERM
if [ "$role" = edge ]; then # the agent is restarted by hand after this, and its goodbye says why (docs/edge-device.md)
  cat deploy/debian/prerm.edge >>"$tree/DEBIAN/prerm"
fi
chmod 0755 "$tree/DEBIAN/postinst" "$tree/DEBIAN/prerm"
mkdir -p "$into"
dpkg-deb --build --root-owner-group -Zxz -z1 "$tree" "$into" | tail -1
