#!/bin/sh
# Runs a command on two nodes with one rank each, as network namespaces with a cable between them: 10.1.0.1 is node0,
# which finds its own name at a loopback address, as on Debian, and 10.1.0.2 is node1, which does so too.
# Arguments: a folder, the command, whose last argument becomes the rank. Variables of ranks come from the environment.
set -e
folder="$1"
shift
hostname node0
echo "127.0.1.1 node0" >"$folder/hosts0"
printf "127.0.1.1 node1\n10.1.0.1 node0\n" >"$folder/hosts1"
mount --bind "$folder/hosts0" /etc/hosts
mount --bind /dev/null /etc/resolv.conf # torch asks for names of addresses, and no server answers there
ip link set lo up
RANK=1 unshare --net --uts --mount sh -ec '
    hostname node1
    mount --bind "$0/hosts1" /etc/hosts
    until ip link set eth1 up 2>/dev/null; do sleep 0.05; done
    ip link set lo up
    ip address add 10.1.0.2/24 dev eth1
    ip route add default dev eth1
    exec "$@" 1
' "$folder" "$@" &
other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
ip link add eth0 type veth peer name eth1 netns "$other"
ip link set eth0 up
ip address add 10.1.0.1/24 dev eth0
ip route add default dev eth0
RANK=0 "$@" 0 || { kill "$other"; exit 1; }
wait "$other"
