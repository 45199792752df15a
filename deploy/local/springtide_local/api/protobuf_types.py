"""Field numbers of the messages that kubectl writes as protobuf.

`{number: (JSON name, type)}`; a type is `string`, `bytes`, `bool`, `int`, `Time`, `Quantity`, `IntOrString`
or the name of a message, with `[]` before it for a list and `map:` for a map of strings to it. Numbers:
Kubernetes' published `generated.proto`.
"""

from __future__ import annotations

_META = (1, ("metadata", "ObjectMeta"))


def _with_meta(**fields: tuple[int, str]) -> dict[int, tuple[str, str]]:
    return dict([_META, *((number, (name, kind)) for name, (number, kind) in fields.items())])


def _of(**fields: tuple[int, str]) -> dict[int, tuple[str, str]]:
    return {number: (name.rstrip("_"), kind) for name, (number, kind) in fields.items()}


MESSAGES: dict[str, dict[int, tuple[str, str]]] = {
    "ObjectMeta": _of(
        name=(1, "string"),
        generateName=(2, "string"),
        namespace=(3, "string"),
        selfLink=(4, "string"),
        uid=(5, "string"),
        resourceVersion=(6, "string"),
        generation=(7, "int"),
        creationTimestamp=(8, "Time"),
        deletionTimestamp=(9, "Time"),
        deletionGracePeriodSeconds=(10, "int"),
        labels=(11, "map:string"),
        annotations=(12, "map:string"),
        ownerReferences=(13, "[]OwnerReference"),
        finalizers=(14, "[]string"),
    ),
    "OwnerReference": _of(
        kind=(1, "string"),
        name=(3, "string"),
        uid=(4, "string"),
        apiVersion=(5, "string"),
        controller=(6, "bool"),
        blockOwnerDeletion=(7, "bool"),
    ),
    "LabelSelector": _of(matchLabels=(1, "map:string"), matchExpressions=(2, "[]LabelSelectorRequirement")),
    "LabelSelectorRequirement": _of(key=(1, "string"), operator=(2, "string"), values=(3, "[]string")),
    "Namespace": _with_meta(spec=(2, "NamespaceSpec"), status=(3, "NamespaceStatus")),
    "NamespaceSpec": _of(finalizers=(1, "[]string")),
    "NamespaceStatus": _of(phase=(1, "string")),
    "ConfigMap": _with_meta(data=(2, "map:string"), binaryData=(3, "map:bytes"), immutable=(4, "bool")),
    "Secret": _with_meta(
        data=(2, "map:bytes"), type=(3, "string"), stringData=(4, "map:string"), immutable=(5, "bool")
    ),
    "ServiceAccount": _with_meta(
        secrets=(2, "[]ObjectReference"),
        imagePullSecrets=(3, "[]LocalObjectReference"),
        automountServiceAccountToken=(4, "bool"),
    ),
    "ObjectReference": _of(
        kind=(1, "string"),
        namespace=(2, "string"),
        name=(3, "string"),
        uid=(4, "string"),
        apiVersion=(5, "string"),
        resourceVersion=(6, "string"),
        fieldPath=(7, "string"),
    ),
    "LocalObjectReference": _of(name=(1, "string")),
    "ResourceQuota": _with_meta(spec=(2, "ResourceQuotaSpec"), status=(3, "ResourceQuotaStatus")),
    "ResourceQuotaSpec": _of(hard=(1, "map:Quantity"), scopes=(2, "[]string")),
    "ResourceQuotaStatus": _of(hard=(1, "map:Quantity"), used=(2, "map:Quantity")),
    "Service": _with_meta(spec=(2, "ServiceSpec"), status=(3, "ServiceStatus")),
    "ServiceSpec": _of(
        ports=(1, "[]ServicePort"),
        selector=(2, "map:string"),
        clusterIP=(3, "string"),
        type=(4, "string"),
        externalIPs=(5, "[]string"),
        sessionAffinity=(7, "string"),
        externalName=(10, "string"),
        publishNotReadyAddresses=(13, "bool"),
    ),
    "ServicePort": _of(
        name=(1, "string"),
        protocol=(2, "string"),
        port=(3, "int"),
        targetPort=(4, "IntOrString"),
        nodePort=(5, "int"),
        appProtocol=(6, "string"),
    ),
    "ServiceStatus": _of(loadBalancer=(1, "LoadBalancerStatus")),
    "LoadBalancerStatus": {},
    "Deployment": _with_meta(spec=(2, "DeploymentSpec"), status=(3, "DeploymentStatus")),
    "DeploymentSpec": _of(
        replicas=(1, "int"),
        selector=(2, "LabelSelector"),
        template=(3, "PodTemplateSpec"),
        strategy=(4, "DeploymentStrategy"),
        minReadySeconds=(5, "int"),
        revisionHistoryLimit=(6, "int"),
        paused=(7, "bool"),
        progressDeadlineSeconds=(9, "int"),
    ),
    "DeploymentStrategy": _of(type=(1, "string")),
    "DeploymentStatus": _of(
        observedGeneration=(1, "int"),
        replicas=(2, "int"),
        updatedReplicas=(3, "int"),
        availableReplicas=(4, "int"),
        unavailableReplicas=(5, "int"),
        readyReplicas=(7, "int"),
    ),
    "PodTemplateSpec": _with_meta(spec=(2, "PodSpec")),
    "PodSpec": _of(
        containers=(2, "[]Container"),
        restartPolicy=(3, "string"),
        terminationGracePeriodSeconds=(4, "int"),
        dnsPolicy=(6, "string"),
        nodeSelector=(7, "map:string"),
        serviceAccountName=(8, "string"),
        serviceAccount=(9, "string"),
        nodeName=(10, "string"),
        hostNetwork=(11, "bool"),
        hostPID=(12, "bool"),
        hostIPC=(13, "bool"),
        hostname=(16, "string"),
        subdomain=(17, "string"),
        schedulerName=(19, "string"),
    ),
    "Container": _of(
        name=(1, "string"),
        image=(2, "string"),
        command=(3, "[]string"),
        args=(4, "[]string"),
        workingDir=(5, "string"),
        ports=(6, "[]ContainerPort"),
        env=(7, "[]EnvVar"),
        resources=(8, "ResourceRequirements"),
        terminationMessagePath=(13, "string"),
        imagePullPolicy=(14, "string"),
        stdin=(16, "bool"),
        stdinOnce=(17, "bool"),
        tty=(18, "bool"),
        terminationMessagePolicy=(20, "string"),
    ),
    "ContainerPort": _of(
        name=(1, "string"),
        hostPort=(2, "int"),
        containerPort=(3, "int"),
        protocol=(4, "string"),
        hostIP=(5, "string"),
    ),
    "EnvVar": _of(name=(1, "string"), value=(2, "string")),
    "ResourceRequirements": _of(limits=(1, "map:Quantity"), requests=(2, "map:Quantity")),
    "PodDisruptionBudget": _with_meta(
        spec=(2, "PodDisruptionBudgetSpec"), status=(3, "PodDisruptionBudgetStatus")
    ),
    "PodDisruptionBudgetSpec": _of(
        minAvailable=(1, "IntOrString"),
        selector=(2, "LabelSelector"),
        maxUnavailable=(3, "IntOrString"),
        unhealthyPodEvictionPolicy=(4, "string"),
    ),
    "PodDisruptionBudgetStatus": _of(
        observedGeneration=(1, "int"),
        disruptionsAllowed=(3, "int"),
        currentHealthy=(4, "int"),
        desiredHealthy=(5, "int"),
        expectedPods=(6, "int"),
    ),
    "Eviction": _with_meta(deleteOptions=(2, "DeleteOptions")),
    "DeleteOptions": _of(
        gracePeriodSeconds=(1, "int"),
        preconditions=(2, "Preconditions"),
        orphanDependents=(3, "bool"),
        propagationPolicy=(4, "string"),
        dryRun=(5, "[]string"),
    ),
    "Preconditions": _of(uid=(1, "string"), resourceVersion=(2, "string")),
    "TokenRequest": _with_meta(spec=(2, "TokenRequestSpec"), status=(3, "TokenRequestStatus")),
    "TokenRequestSpec": _of(
        audiences=(1, "[]string"), boundObjectRef=(3, "BoundObjectReference"), expirationSeconds=(4, "int")
    ),
    "BoundObjectReference": _of(
        kind=(1, "string"), apiVersion=(2, "string"), name=(3, "string"), uid=(4, "string")
    ),
    "TokenRequestStatus": _of(token=(1, "string"), expirationTimestamp=(2, "Time")),
    "Role": _with_meta(rules=(2, "[]PolicyRule")),
    "ClusterRole": _with_meta(rules=(2, "[]PolicyRule"), aggregationRule=(3, "AggregationRule")),
    "AggregationRule": _of(clusterRoleSelectors=(1, "[]LabelSelector")),
    "PolicyRule": _of(
        verbs=(1, "[]string"),
        apiGroups=(2, "[]string"),
        resources=(3, "[]string"),
        resourceNames=(4, "[]string"),
        nonResourceURLs=(5, "[]string"),
    ),
    "RoleBinding": _with_meta(subjects=(2, "[]Subject"), roleRef=(3, "RoleRef")),
    "Subject": _of(kind=(1, "string"), apiGroup=(2, "string"), name=(3, "string"), namespace=(4, "string")),
    "RoleRef": _of(apiGroup=(1, "string"), kind=(2, "string"), name=(3, "string")),
    "PriorityClass": _with_meta(
        value=(2, "int"),
        globalDefault=(3, "bool"),
        description=(4, "string"),
        preemptionPolicy=(5, "string"),
    ),
    "AccessReview": _with_meta(spec=(2, "AccessReviewSpec"), status=(3, "AccessReviewStatus")),
    "AccessReviewSpec": _of(
        resourceAttributes=(1, "ResourceAttributes"), nonResourceAttributes=(2, "NonResourceAttributes")
    ),
    "ResourceAttributes": _of(
        namespace=(1, "string"),
        verb=(2, "string"),
        group=(3, "string"),
        version=(4, "string"),
        resource=(5, "string"),
        subresource=(6, "string"),
        name=(7, "string"),
    ),
    "NonResourceAttributes": _of(path=(1, "string"), verb=(2, "string")),
    "AccessReviewStatus": _of(allowed=(1, "bool"), reason=(2, "string")),
    "RulesReview": _with_meta(spec=(2, "RulesReviewSpec"), status=(3, "RulesReviewStatus")),
    "RulesReviewSpec": _of(namespace=(1, "string")),
    "RulesReviewStatus": _of(incomplete=(3, "bool")),
    "SelfSubjectReview": _with_meta(status=(2, "SelfSubjectReviewStatus")),
    "SelfSubjectReviewStatus": _of(userInfo=(1, "UserInfo")),
    "UserInfo": _of(username=(1, "string"), uid=(2, "string")),
}

_RBAC = "rbac.authorization.k8s.io/v1"
KINDS: dict[tuple[str, str], str] = {
    **{
        ("v1", kind): kind
        for kind in ("Namespace", "ConfigMap", "Secret", "ServiceAccount", "ResourceQuota", "Service")
    },
    ("v1", "DeleteOptions"): "DeleteOptions",
    ("policy/v1", "DeleteOptions"): "DeleteOptions",
    ("apps/v1", "DeleteOptions"): "DeleteOptions",
    ("meta.k8s.io/v1", "DeleteOptions"): "DeleteOptions",
    ("apps/v1", "Deployment"): "Deployment",
    ("policy/v1", "PodDisruptionBudget"): "PodDisruptionBudget",
    ("policy/v1", "Eviction"): "Eviction",
    ("authentication.k8s.io/v1", "TokenRequest"): "TokenRequest",
    ("authentication.k8s.io/v1", "SelfSubjectReview"): "SelfSubjectReview",
    ("authorization.k8s.io/v1", "SelfSubjectAccessReview"): "AccessReview",
    ("authorization.k8s.io/v1", "SelfSubjectRulesReview"): "RulesReview",
    (_RBAC, "Role"): "Role",
    (_RBAC, "ClusterRole"): "ClusterRole",
    (_RBAC, "RoleBinding"): "RoleBinding",
    (_RBAC, "ClusterRoleBinding"): "RoleBinding",
    ("scheduling.k8s.io/v1", "PriorityClass"): "PriorityClass",
}
