{{- define "forge-jax.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "forge-jax.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* The labels of pods that serve HTTP. LeaderWorkerSet sets the index. */ -}}
{{- define "forge-jax.serving" -}}
{{ include "forge-jax.selector" . }}
{{- if gt (int .Values.hosts) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{- define "forge-jax.labels" -}}
{{ include "forge-jax.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* A probe of /health that fails after `seconds`, rounded up to whole periods. */ -}}
{{- define "forge-jax.probe" -}}
httpGet: {path: /health, port: http}
periodSeconds: {{ .period }}
timeoutSeconds: {{ .period }}
failureThreshold: {{ div (add .seconds .period -1) .period }}
{{- end -}}

{{- define "forge-jax.pod" -}}
{{- $several := gt (int .Values.hosts) 1 -}}
{{- $drain := add .Values.preStopSeconds .Values.drainTimeoutSeconds -}}
metadata:
  labels:
    {{- include "forge-jax.selector" . | nindent 4 }}
    llm-d.ai/engine-type: vllm  # llm-d then reads the metrics by vLLM's names
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add $drain 20 }}
  {{- range $name := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "runtimeClassName" "priorityClassName" }}
  {{- with index $.Values $name }}
  {{ $name }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  containers:
    - name: forge-jax
      image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - {{ .Values.model | quote }}
        - --engine-process
        - --tensor-parallel={{ .Values.tensorParallel }}
        - --drain-timeout={{ .Values.drainTimeoutSeconds }}
        {{- if .Values.apiKeys.existingSecret }}
        - --api-key-file=/etc/forge-jax/{{ .Values.apiKeys.key }}
        {{- end }}
        {{- if $several }}
        - --num-hosts=$(LWS_GROUP_SIZE)
        - --host-rank=$(LWS_WORKER_INDEX)
        - --coordinator=$(LWS_LEADER_ADDRESS):{{ .Values.coordinatorPort }}
        {{- end }}
        {{- range .Values.args }}
        - {{ . | quote }}
        {{- end }}
      {{- if or .Values.env .Values.huggingFaceToken.existingSecret }}
      env:
        {{- with .Values.huggingFaceToken }}
        {{- if .existingSecret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}
        {{- end }}
        {{- end }}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      ports:
        - {name: http, containerPort: 8000}
      startupProbe:
        {{- include "forge-jax.probe" (dict "period" 5 "seconds" .Values.probes.startupSeconds) | nindent 8 }}
      readinessProbe:
        {{- include "forge-jax.probe" (dict "period" 5 "seconds" .Values.probes.readinessSeconds) | nindent 8 }}
      livenessProbe:
        {{- include "forge-jax.probe" (dict "period" 10 "seconds" .Values.probes.livenessSeconds) | nindent 8 }}
      lifecycle:
        preStop:
          exec:
            {{- if $several }}
            # The other hosts stay until host 0 has finished its requests.
            command: [sh, -c, '[ "$LWS_WORKER_INDEX" != 0 ] || exec sleep {{ .Values.preStopSeconds }}; exec sleep {{ add $drain 5 }}']
            {{- else }}
            command: [sleep, {{ .Values.preStopSeconds | quote }}]
            {{- end }}
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts:
        - {name: state, mountPath: /var/lib/forge-jax}
        {{- if .Values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /etc/forge-jax, readOnly: true}
        {{- end }}
        {{- if gt (int .Values.tensorParallel) 1 }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
  volumes:
    - name: state  # models and compiled executables
      {{- if .Values.persistence.enabled }}
      persistentVolumeClaim:
        claimName: {{ .Values.persistence.existingClaim | default (include "forge-jax.fullname" .) }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- if .Values.apiKeys.existingSecret }}
    - name: api-keys
      secret: {secretName: {{ .Values.apiKeys.existingSecret }}}
    {{- end }}
    {{- if gt (int .Values.tensorParallel) 1 }}
    - name: shared-memory  # for NCCL
      emptyDir: {medium: Memory}
    {{- end }}
{{- end -}}
