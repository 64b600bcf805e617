{{- define "tidegate.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tidegate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tidegate.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tidegate.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select: (dict "root" $ "part" "gateway") */}}
{{- define "tidegate.selector" -}}
app.kubernetes.io/name: {{ include "tidegate.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "tidegate.labels" -}}
{{ include "tidegate.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The gateway's configuration: what the chart sets, with the values' own keys on top. */}}
{{- define "tidegate.gatewayConfig" -}}
{{- $config := dict
      "host" "0.0.0.0"
      "http_port" 8000 "grpc_port" 8001 "metrics_port" 8002 "admin_port" 8003
      "model_repository" "/var/lib/tidegate/models"
      "gateways" (int .Values.gateway.replicas)
      "drain_s" (float64 .Values.gateway.drainSeconds)
      "log_format" "json" -}}
{{- if .Values.pool.enabled -}}
{{- $source := dict "source" "kubernetes" "service" (printf "%s-pool" (include "tidegate.fullname" .)) "port_name" "grpc" -}}
{{- $_ := set $config "discovery" (list $source) -}}
{{- $_ := set $config "scaling" (dict "min_replicas" (int .Values.autoscaling.minReplicas) "max_replicas" (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if ne .Values.tls.mode "none" -}}
{{- $_ := set $config "tls" (include "tidegate.tlsConfig" . | fromYaml) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.gateway.config)) -}}
{{- end -}}

{{- define "tidegate.poolConfig" -}}
{{- $config := dict
      "host" "0.0.0.0" "grpc_port" 8101 "metrics_port" 8102
      "model_repository" "/var/lib/tidegate/models"
      "device" (ternary "cuda" "cpu" (eq .Values.pool.device "cuda"))
      "log_format" "json" -}}
{{- if ne .Values.tls.mode "none" -}}
{{- $_ := set $config "tls" (include "tidegate.tlsConfig" . | fromYaml) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.pool.config)) -}}
{{- end -}}

{{/*
Ports that a pool calls, as an array of JSON: of the URLs of its broker and its collector of traces, in its configuration
or in its variables. Where a URL cannot be read (a Secret has it) those that are usual for it.
*/}}
{{- define "tidegate.poolCalls" -}}
{{- $config := include "tidegate.poolConfig" . | fromYaml -}}
{{- $brokers := list 1883 8883 -}}
{{- $collectors := list 4318 -}}
{{- $variables := dict "TIDEGATE_POOL_MQTT" $brokers "TIDEGATE_POOL_TRACING__ENDPOINT" $collectors -}}
{{- $urls := list (list $config.mqtt $brokers) (list (default dict $config.tracing).endpoint $collectors) -}}
{{- range $variable := .Values.pool.env -}}
{{- with get $variables (upper $variable.name) -}}
{{- $urls = append $urls (list (ternary "?" $variable.value (hasKey $variable "valueFrom")) .) -}}
{{- end -}}
{{- end -}}
{{- $schemes := dict "mqtt" 1883 "mqtts" 8883 "http" 80 "https" 443 -}}
{{- $ports := list -}}
{{- range $url := $urls -}}
{{- with first $url -}}
{{- $head := regexFind "^[A-Za-z]+://[^/?#]*" . -}}
{{- $said := regexFind ":[0-9]+$" $head | trimPrefix ":" -}}
{{- $port := int (default (get $schemes (lower (first (splitList "://" $head)))) $said) -}}
{{- $ports = concat $ports (ternary (list $port) (last $url) (and (gt $port 0) (lt $port 65536))) -}}
{{- end -}}
{{- end -}}
{{- uniq $ports | toJson -}}
{{- end -}}

{{/* A port of a configuration that somebody has to find: (dict "config" … "part" "gateway" "key" "http_port") */}}
{{- define "tidegate.port" -}}
{{- $port := int (get .config .key) -}}
{{- if not $port -}}
{{- fail (printf "%s.config.%s: 0 takes a free port, which no Service, no probe and no scaler would find; name one" .part .key) -}}
{{- end -}}
{{- $port -}}
{{- end -}}

{{- define "tidegate.tlsConfig" -}}
cert: /etc/tidegate/pki/tls.crt
key: /etc/tidegate/pki/tls.key
ca: /etc/tidegate/pki/ca.crt
{{- end -}}

{{/* The volume with certificates: (dict "root" $ "part" "gateway" "hosts" (list …)) */}}
{{- define "tidegate.tlsVolume" -}}
{{- $tls := .root.Values.tls -}}
- name: pki
{{- if eq $tls.mode "secret" }}
  secret:
    secretName: {{ required (printf "tls.secret.%s: with tls.mode=secret it names the Secret of the %s" .part .part) (get $tls.secret .part) }}
    defaultMode: 288
{{- else }}
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ required "tls.csi.issuerName: with tls.mode=csi it names the issuer of the fleet's CA" $tls.csi.issuerName }}
      csi.cert-manager.io/issuer-kind: {{ $tls.csi.issuerKind }}
      csi.cert-manager.io/common-name: {{ ternary "gw" "pool" (eq .part "gateway") }}~${POD_NAME}
      csi.cert-manager.io/uri-sans: tidegate://{{ .part }}/${POD_NAME}
      csi.cert-manager.io/dns-names: {{ prepend .hosts (printf "${POD_NAME}.%s.tidegate.internal" .part) | join "," }}
      csi.cert-manager.io/key-usages: digital signature,key encipherment,server auth,client auth
      csi.cert-manager.io/fs-group: "65532"
{{- end }}
{{- end -}}

{{/* The part of a pod that does not depend on the process. */}}
{{- define "tidegate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tidegate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Topology spread: (dict "root" $ "part" "gateway") */}}
{{- define "tidegate.spread" -}}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: {{ $.root.Values.topologySpread.whenUnsatisfiable }}
  labelSelector:
    matchLabels:
      {{- include "tidegate.selector" $ | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "tidegate.modelsVolume" -}}
{{- if not .Values.models.volume -}}
{{- fail "models.volume: name a volume with models, for example --set models.volume.persistentVolumeClaim.claimName=models" -}}
{{- end -}}
- name: models
  {{- toYaml .Values.models.volume | nindent 2 }}
{{- end -}}

{{- define "tidegate.mounts" -}}
- {name: config, mountPath: /etc/tidegate}
- {name: state, mountPath: /var/lib/tidegate}
- name: models
  mountPath: /var/lib/tidegate/models
  readOnly: true
  {{- with .Values.models.subPath }}
  subPath: {{ . }}
  {{- end }}
- {name: tmp, mountPath: /tmp}
{{- if ne .Values.tls.mode "none" }}
- {name: pki, mountPath: /etc/tidegate/pki, readOnly: true}
{{- end }}
{{- end -}}
