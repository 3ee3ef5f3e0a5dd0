/* Any bytes as a YAML file and as a configuration: a tree or one error, never a crash, a leak or a
 * hang. What parses is also dumped and read back. */
#include "config/config.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"f.yaml", "f.json"};
    const char *name = names[size > 0 && data[0] == '{'];
    const char *text = (const char *)data;
    ith_error err = {0};
    ith_yaml yaml;
    if (ith_yaml_parse(&yaml, text, (int64_t)size, name, &err) != ITH_OK) {
        if (err.text[0] == '\0')
            abort();
        return 0;
    }
    ith_yaml_deinit(&yaml);
    ith_config config;
    if (ith_config_parse(&config, text, (int64_t)size, name, NULL, 0, &err) != ITH_OK) {
        if (err.text[0] == '\0')
            abort();
        return 0;
    }
    ith_buf dump = {0}, again = {0};
    ith_config second;
    if (ith_config_dump(&config, true, &dump, &err) != ITH_OK ||
        ith_config_parse(&second, dump.data, dump.len, "dump.yaml", NULL, 0, &err) != ITH_OK ||
        ith_config_dump(&second, true, &again, &err) != ITH_OK ||
        strcmp(dump.data, again.data) != 0)
        abort();
    ith_config_check_supported(&config, &err);
    ith_config_deinit(&config);
    ith_config_deinit(&second);
    ith_buf_deinit(&dump);
    ith_buf_deinit(&again);
    return 0;
}
