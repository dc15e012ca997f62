// Renders a chart as `helm template` does, with the libraries that Helm renders with: Go's templates and sprig.
//
//	go run tests/deploy/helm/main.go CHART RELEASE [VALUES.yaml]
//
// What Helm adds to the two (include, toYaml, required, Files.Get) is as its documentation says; hooks, dependencies,
// lookups and schemas are not there, and the chart has none. test_helm.py holds it against Helm's own library.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

type object = map[string]interface{}

type files struct{ chart string }

// Get is empty for a file that is not there, as Helm's is.
func (f files) Get(name string) string {
	data, _ := os.ReadFile(filepath.Join(f.chart, name))
	return string(data)
}

func main() {
	if len(os.Args) < 3 {
		fail(errors.New("usage: main.go CHART RELEASE [VALUES.yaml]"))
	}
	chart, release := os.Args[1], os.Args[2]
	values := read(filepath.Join(chart, "values.yaml"))
	if len(os.Args) > 3 {
		values = merge(values, read(os.Args[3]))
	}
	about := object{}
	for key, value := range read(filepath.Join(chart, "Chart.yaml")) {
		about[strings.ToUpper(key[:1])+key[1:]] = value
	}
	templates := template.New("chart").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	functions["toYaml"] = func(value interface{}) string {
		data, err := yaml.Marshal(value)
		fail(err)
		return strings.TrimSuffix(string(data), "\n")
	}
	functions["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := templates.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	functions["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, errors.New(message)
		}
		return value, nil
	}
	templates.Funcs(functions)
	paths, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	fail(err)
	sort.Strings(paths)
	base := filepath.Base(chart) + "/templates"
	for _, path := range paths {
		data, err := os.ReadFile(path)
		fail(err)
		_, err = templates.New(base + "/" + filepath.Base(path)).Parse(string(data))
		fail(err)
	}
	for _, path := range paths {
		if strings.HasPrefix(filepath.Base(path), "_") {
			continue
		}
		name := base + "/" + filepath.Base(path)
		var out bytes.Buffer
		fail(templates.ExecuteTemplate(&out, name, object{
			"Values":   values,
			"Chart":    about,
			"Release":  object{"Name": release, "Namespace": "default", "Service": "Helm"},
			"Template": object{"Name": name, "BasePath": base},
			"Files":    files{chart},
		}))
		if strings.HasSuffix(path, ".yaml") && strings.TrimSpace(out.String()) != "" {
			fmt.Printf("---\n# Source: %s\n%s\n", name, strings.ReplaceAll(out.String(), "<no value>", ""))
		}
	}
}

func read(path string) object {
	data, err := os.ReadFile(path)
	fail(err)
	value := object{}
	fail(yaml.Unmarshal(data, &value))
	return value
}

// merge puts the second over the first, mapping by mapping.
func merge(base, over object) object {
	for key, value := range over {
		under, below := base[key].(object)
		above, isObject := value.(object)
		if below && isObject {
			value = merge(under, above)
		}
		base[key] = value
	}
	return base
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
