{{- define "ropeway.name" -}}
{{- printf "%s" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "ropeway.selector" -}}
app.kubernetes.io/name: ropeway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ropeway.labels" -}}
{{ include "ropeway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "ropeway.redis" -}}
{{- .Values.redis.url | default (printf "redis://%s-valkey:6379" (include "ropeway.name" .)) -}}
{{- end -}}

{{- define "ropeway.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
