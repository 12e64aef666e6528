"""Manages networks and instances through a client that was generated from docs/openapi.json.

Arguments: the URL of the API, a namespace and a key.
"""

import importlib
import pkgutil
import sys
import time
import uuid

import client
from client import AuthenticatedClient, Client
from client.api.auth import post_auth
from client.api.instances import (
    delete_instances_instance_ref,
    get_instances,
    get_instances_instance_ref,
    get_instances_instance_ref_events,
    post_instances,
    post_instances_instance_ref_metadata,
    post_instances_instance_ref_poweroff,
)
from client.api.networks import (
    delete_networks_network_ref,
    get_networks,
    get_networks_network_ref,
    post_networks,
    post_networks_network_ref_route,
)
from client.models import (
    DiskBus,
    Error,
    InstanceState,
    Login,
    NetworkState,
    NewDisk,
    NewInstance,
    NewItem,
    NewNetwork,
    NewNetworkInterface,
    PowerState,
    Token,
)

TIMEOUT = 120


def wait_for(what, state, get):
    """Returns an object once it has a state."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        found = get()
        if found.state == state:
            return found
        if time.monotonic() > deadline:
            sys.exit(f"timed out waiting for {what}: {found}")
        time.sleep(0.1)


def main(url, namespace, key):
    for module in pkgutil.walk_packages(client.__path__, "client."):
        importlib.import_module(module.name)

    token = post_auth.sync(client=Client(base_url=url), body=Login(namespace=namespace, key=key))
    assert isinstance(token, Token), token
    refused = post_auth.sync(client=Client(base_url=url), body=Login(namespace=namespace, key="wrong"))
    assert isinstance(refused, Error) and refused.status == 401 and refused.request_id, refused
    api = AuthenticatedClient(base_url=url, token=token.access_token)

    network = post_networks.sync(client=api, body=NewNetwork(name="generated", netblock="10.61.0.0/24"))
    get_network = lambda: get_networks_network_ref.sync(network.uuid, client=api)
    network = wait_for("the network", NetworkState.CREATED, get_network)
    assert network.uuid in [listed.uuid for listed in get_networks.sync(client=api)]
    address = post_networks_network_ref_route.sync(network.uuid, client=api)
    assert address.count(".") == 3, address

    new = NewInstance(
        name="generated",
        cpus=1,
        memory=512,
        disk=[NewDisk(size=1), NewDisk(size=2, bus=DiskBus.SATA)],
        network=[NewNetworkInterface(network_uuid=str(network.uuid), address="10.61.0.77")],
    )
    instance = post_instances.sync(client=api, body=new)
    get_instance = lambda: get_instances_instance_ref.sync(instance.uuid, client=api)
    instance = wait_for("the instance", InstanceState.CREATED, get_instance)
    assert instance.power_state == PowerState.ON, instance.power_state
    assert [disk.bus for disk in instance.disk_spec] == [DiskBus.VIRTIO, DiskBus.SATA], instance.disk_spec
    assert [interface.ipv4 for interface in instance.interfaces] == ["10.61.0.77"], instance.interfaces
    assert [listed.name for listed in get_instances.sync(client=api)] == ["generated"]
    item = NewItem(key="colour", value="blue")
    assert post_instances_instance_ref_metadata.sync(instance.uuid, client=api, body=item) is None
    assert get_instance().metadata["colour"] == "blue"
    assert post_instances_instance_ref_poweroff.sync(instance.uuid, client=api) is None
    events = get_instances_instance_ref_events.sync(instance.uuid, client=api, limit=5)
    assert 0 < len(events) <= 5 and all(event.message for event in events), events

    delete_instances_instance_ref.sync(instance.uuid, client=api)
    wait_for("the deletion of the instance", InstanceState.DELETED, get_instance)
    delete_networks_network_ref.sync(network.uuid, client=api)
    wait_for("the deletion of the network", NetworkState.DELETED, get_network)
    missing = get_instances_instance_ref.sync(str(uuid.uuid4()), client=api)
    assert isinstance(missing, Error) and missing.status == 404, missing
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
