"""Services: one cluster address each, taken from a loopback range."""

from __future__ import annotations

import ipaddress

from springtide_local.api import errors
from springtide_local.api.errors import FieldError
from springtide_local.api.kinds.base import Kind, Reader
from springtide_local.ports import Object


class ServiceAddresses:
    """Hands out each address of `network` (CIDR) once, in turn, skipping those in use."""

    def __init__(self, network: str) -> None:
        self.network = ipaddress.IPv4Network(network)
        self._next = 1

    def free(self, used: set[str]) -> str:
        """Raise ApiError 500 when the range is full."""
        size = self.network.num_addresses
        for _ in range(size - 2):
            offset = self._next
            self._next = offset % (size - 2) + 1
            address = str(self.network[offset])
            if address not in used:
                return address
        raise errors.internal("failed to allocate a serviceIP: range is full")


class Services(Kind):
    def default(self, obj: Object) -> None:
        spec = obj.setdefault("spec", {})
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        for port in spec.get("ports") or ():
            port.setdefault("protocol", "TCP")
            if "port" in port:
                port.setdefault("targetPort", port["port"])
        if spec["type"] != "ExternalName":
            spec.setdefault("ipFamilies", ["IPv4"])
            spec.setdefault("ipFamilyPolicy", "SingleStack")
            spec.setdefault("internalTrafficPolicy", "Cluster")

    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Take an address of the cluster, or check the one that is asked for.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.

        Raises:
            ApiError: 422: the address is taken, or none of the cluster's.
        """
        spec = obj["spec"]
        obj["status"] = {"loadBalancer": {}}
        if spec["type"] == "ExternalName" or spec.get("clusterIP") == "None":
            if spec.get("clusterIP") == "None":
                spec["clusterIPs"] = ["None"]
            return
        used = {service["spec"].get("clusterIP", "") for service in store.scan("services")}
        wanted = spec.get("clusterIP") or ""
        if not wanted:
            wanted = store.service_addresses.free(used)
        else:
            self._check_wanted(store, obj, wanted, used)
        spec["clusterIP"] = wanted
        spec["clusterIPs"] = [wanted]

    def _check_wanted(self, store: Reader, obj: Object, wanted: str, used: set[str]) -> None:
        network = store.service_addresses.network
        try:
            inside = ipaddress.IPv4Address(wanted) in network
            why = f"failed to allocate IP {wanted}: the provided IP is not in the valid range. "
            why += f"The range of valid IPs is {network}"
        except ValueError:
            inside, why = False, "must be empty, 'None', or a valid IP address"
        if inside and wanted in used:
            inside, why = False, f"failed to allocate IP {wanted}: provided IP is already allocated"
        if not inside:
            found = [errors.field_invalid("spec.clusterIPs", [wanted], why)]
            raise errors.invalid("", "Service", obj["metadata"].get("name", ""), found)

    def prepare_update(self, store: Reader, obj: Object, old: Object, subresource: str | None) -> None:
        """Keep the address where the writer leaves it out.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        for name in ("clusterIP", "clusterIPs"):
            if name in old["spec"] and not obj["spec"].get(name):
                obj["spec"][name] = old["spec"][name]

    def check(self, obj: Object) -> list[FieldError]:
        spec, found = obj["spec"], []
        types = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
        if spec["type"] not in types:
            found.append(errors.field_unsupported("spec.type", spec["type"], types))
        ports = spec.get("ports") or []
        if not ports and spec["type"] != "ExternalName" and spec.get("clusterIP") != "None":
            found.append(errors.field_required("spec.ports"))
        names: set[str] = set()
        for index, port in enumerate(ports):
            name = port.get("name", "")
            if len(ports) > 1 and not name:
                found.append(errors.field_required(f"spec.ports[{index}].name"))
            if name and name in names:
                found.append(errors.field_duplicate(f"spec.ports[{index}].name", name))
            names.add(name)
            number = port.get("port", 0)
            if not 0 < number < 65536:
                text = "must be between 1 and 65535, inclusive"
                found.append(errors.field_invalid(f"spec.ports[{index}].port", number, text))
        return found

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        """Return an error if the address is changed, which may not be.

        Args:
            obj: the object as it is to be stored.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        before = old["spec"].get("clusterIP")
        if before and obj["spec"]["type"] != "ExternalName" and obj["spec"].get("clusterIP") != before:
            text = "may not change once set"
            return [errors.field_invalid("spec.clusterIPs[0]", obj["spec"].get("clusterIP"), text)]
        return []
